"""Verification while a run goes on: it changes no record, compares its whole share, and names what differs."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from actors.messages import GroupFailure, GroupResult
from rollout.canary import CANARY_NAME, Canary, chosen
from rollout.driver import sample_run
from rollout.shards import content_hash, read_trajectories
from sampling.params import SamplingParams
from sampling.types import Group, Request
from tests.rollout.records import completion, trajectory


def settled(canary, records, drawn, scored):
    """Has the canary ask for a group again, and answers with `drawn` and `scored`."""
    canary.watch(Request("p", [1, 5, 6], SamplingParams()), records)
    answers = [
        GroupResult(request, Group("p", tuple(scored if request.forward else drawn)), "worker-0")
        for request in canary.requests()
    ]
    assert len(answers) == 2 and canary.waiting
    assert all(canary.settle(answer) for answer in answers) and not canary.waiting
    return canary.report()


def test_equal_bits_pass_and_distances_are_reported():
    far = completion(behaviour_logprobs=np.array([-0.5, -0.70001], np.float32))
    report = settled(Canary(1.0, "float32"), [trajectory()], [completion()], [far])
    assert report.faults == () and (report.samples, report.tokens) == (1, 2)
    assert "median 1.00e-05" in report.distances and "largest 1.00e-05" in report.distances


def test_a_changed_bit_is_named():
    other = completion(behaviour_logprobs=np.nextafter(completion().behaviour_logprobs, np.float32(-9)))
    report = settled(Canary(1.0, "float32"), [trajectory()], [other], [completion()])
    (fault,) = report.faults
    assert fault.startswith("drawn again: prompt 'p', sample 0: behaviour_logprobs of completion token 0: expected")


def test_forward_scores_that_lie_too_far_are_a_fault():
    far = completion(behaviour_logprobs=np.array([-0.5, -0.71], np.float32))
    report = settled(Canary(1.0, "float32"), [trajectory()], [completion()], [far])
    assert report.faults == (
        "forward scores: expected 99.9 % of the tokens within 0.0001 nats of their records, got 1.00e-02",
    )
    undefined = completion(behaviour_logprobs=np.array([-0.5, np.nan], np.float32))
    assert settled(Canary(1.0, "bfloat16"), [trajectory()], [completion()], [undefined]).faults


def test_a_check_that_fails_is_a_fault_and_other_outcomes_are_left_alone():
    canary = Canary(1.0, "float32")
    request = Request("p", [1, 5, 6], SamplingParams())
    canary.watch(request, [trajectory()])
    asked = list(canary.requests())
    assert not canary.settle(GroupResult(request, Group("p", (completion(),)), "worker-0"))
    for one in asked:
        assert canary.settle(GroupFailure(one, "WorkerError", "lost", 3, "worker-0"))
    assert canary.report().faults == ("prompt 'p': WorkerError: lost",) * 2


def test_what_other_weights_drew_is_not_compared():
    later = completion(behaviour_logprobs=np.array([-1, -2], np.float32), policy_versions=np.array([1, 1], np.int32))
    report = settled(Canary(1.0, "float32"), [trajectory()], [later], [later])
    assert report.faults == () and (report.samples, report.tokens) == (0, 0)


def test_the_share_is_a_share():
    picked = [chosen(f"p{i}", 0.25) for i in range(4000)]
    assert 0.22 < np.mean(picked) < 0.28 and picked == [chosen(f"p{i}", 0.25) for i in range(4000)]


@pytest.mark.ray
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_verifies_itself_and_writes_the_same_records(local_ray, tiny_config, tmp_path, workers):
    config = tiny_config(workers={"count": workers, "cpus": 0, "threads": 1})
    plain = sample_run(config, tmp_path / "plain")
    checked = sample_run(
        config.model_copy(update={"verify": config.verify.model_copy(update={"share": 1.0})}), tmp_path / "checked"
    )
    assert content_hash(read_trajectories(tmp_path / "plain")) == content_hash(read_trajectories(tmp_path / "checked"))
    assert plain.canary is None and checked.canary is not None
    assert checked.canary.faults == () and checked.canary.samples == checked.trajectories
    assert checked.canary.tokens == checked.tokens
    written = json.loads((tmp_path / "checked" / CANARY_NAME).read_text())
    assert written == {**dataclasses.asdict(checked.canary), "faults": []}
