"""What verification promises: a sound run passes to the bit, and whatever was changed in a record is named."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest

from rollout.codec import read_parquet, write_parquet
from rollout.manifest import read_manifest
from rollout.shards import SHARDS_NAME
from rollout.verify import verify_run
from tests.tiny_models import tiny_llama

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


@pytest.fixture
def run(finished, tiny_config, tmp_path):
    """A copy of a finished run that a test may damage."""
    return shutil.copytree(finished(tiny_config()), tmp_path / "run")


def change(run, row, **fields):
    """Replaces fields of one record of the run's first file."""
    file = run / SHARDS_NAME / read_manifest(run).shards[0].file
    records = list(read_parquet(file))
    changed = {name: new(getattr(records[row], name)) for name, new in fields.items()}
    records[row] = dataclasses.replace(records[row], **changed)
    write_parquet(file, records)
    return records[row]


def with_entry(index, value):
    def changed(array):
        array = array.copy()
        array[index] = value(array[index])
        return array

    return changed


def test_a_sound_run_passes_to_the_bit(run):
    found = verify_run(run)
    assert found.faults == [] and found.bit_exact
    assert found.samples == read_manifest(run).rows and found.tokens == read_manifest(run).tokens
    assert found.distances.quantile(1) == 0.0


def test_a_share_is_the_same_share_every_time(run):
    counts = [verify_run(run, share=0.4).samples for _ in range(2)]
    assert 0 < counts[0] == counts[1] < read_manifest(run).rows
    assert verify_run(run, share=1e-9).samples == 1  # the first prompt has one sample


def one_bit_lower(value):
    return np.nextafter(value, np.float32(-9))


@pytest.mark.parametrize(
    ("row", "field", "new", "says"),
    [
        (1, "completion_tokens", with_entry(2, lambda token: token ^ 1), "completion token 2: expected"),
        (1, "behaviour_logprobs", with_entry(1, one_bit_lower), "behaviour_logprobs of completion token 1"),
        (1, "model_logprobs", with_entry(0, one_bit_lower), "model_logprobs of completion token 0"),
        (2, "policy", lambda policy: {**policy, "temperature": 0.9}, "policy: temperature differ"),
        (1, "entropy", with_entry(1, one_bit_lower), "entropy of completion token 1"),
        (1, "forced", lambda _: np.array([1], np.int32), "forced: expected places [], got [1]"),
        (1, "key", with_entry(0, lambda word: word + np.uint32(1)), "key: expected"),
    ],
)
def test_a_changed_record_is_named(run, row, field, new, says):
    record = change(run, row, **{field: new})
    found = verify_run(run)
    where = f"prompt {record.prompt_id!r}, sample {record.sample_index}: "
    assert [fault for fault in found.faults if fault.startswith(where + says)]
    assert [fault for fault in found.faults if "changed, truncated or damaged" in fault]
    assert len(found.faults) == 2


def test_a_truncated_file_is_named_and_the_rest_is_checked(run):
    shards = read_manifest(run).shards
    file = run / SHARDS_NAME / shards[1].file
    file.write_bytes(file.read_bytes()[:-200])
    found = verify_run(run)
    assert found.faults and all(shards[1].file in fault for fault in found.faults)
    assert found.samples == read_manifest(run).rows - shards[1].rows


def test_other_weights_are_noticed(run, tmp_path):
    other = tiny_llama(tmp_path / "other", seed=77)
    config = (run / "config.yaml").read_text().splitlines()
    config = [f"  checkpoint: {other}" if line.strip().startswith("checkpoint:") else line for line in config]
    (run / "config.yaml").write_text("\n".join(config))
    faults = verify_run(run).faults
    assert faults[0].startswith("weights: expected digest")
    assert any("completion token" in fault for fault in faults[1:])


def test_other_numerics_are_compared_within_a_bound(run):
    """As if the run had been made elsewhere: the recorded tokens are scored, not drawn."""
    manifest = read_manifest(run)
    (facts,) = manifest.numerics.values()
    manifest.model_copy(update={"numerics": {"elsewhere": facts}}).write(run)
    found = verify_run(run)
    assert found.faults == [] and not found.bit_exact and found.samples == manifest.rows
    change(run, 1, behaviour_logprobs=with_entry(1, lambda v: v - np.float32(0.01)))
    assert any("behaviour_logprobs of completion token 1" in fault for fault in verify_run(run).faults)
