"""The promise of equal bits, end to end on a tiny model: docs/exactness.md says which test proves which line.

A row is its tokens, both log-probs, kept mass, entropy, supports, key and reason to end, in float32 and in bfloat16.

1.  In an engine: alone, in a full batch, in every slot, after other tenants, in any order of arrival, in groups of any
    size, taken up again at any token.
2.  In another process, which compiles its programs anew.
3.  In runs: with one, two and three workers, with more samples, other prompts beside it and another order of prompts.
4.  From disk: `rollout verify` in a process of its own finds every bit again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollout.config_file import parse_config
from rollout.driver import sample_run
from rollout.manifest import read_manifest
from rollout.shards import content_hash, read_trajectories
from sampling import Request, SamplingParams, StopReason
from sampling.fingerprint import fingerprint_digest, numerics_fingerprint
from tests.rollout.exact_work import (
    GEOMETRY,
    POLICIES,
    PROMPTS,
    SEED,
    bits,
    digest,
    make_engine,
    requests,
    rows,
    strangers,
    tokens,
)
from tests.tiny_models import TOKENIZER_LEN, tiny_llama

ROOT = Path(__file__).parents[2]
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """Without ids past the tokenizer's: a row that no stage touches skips the chain if its neighbours let it."""
    return str(tiny_llama(tmp_path_factory.mktemp("checkpoint") / "llama", vocab_size=TOKENIZER_LEN))


@pytest.fixture(scope="module", params=DTYPES)
def engine(request, checkpoint):
    return make_engine(checkpoint, request.param)


@pytest.fixture(scope="module")
def alone(engine):
    """Every request by itself in an engine that is otherwise empty."""
    return {name: row for request in requests() for name, row in rows(engine.generate([request])).items()}


def ours(found, expected):
    """Those rows of a crowd that are to be compared."""
    return {name: found[name] for name in expected}


def test_the_rows_end_in_more_than_one_way(alone):
    assert {row["stop_reason"] for row in alone.values()} >= {StopReason.LENGTH, StopReason.STOP_STRING}
    assert alone["filters", 0]["support_ids"], "no support was recorded"
    assert len({row["completion_tokens"] for row in alone.values()}) == len(POLICIES)


def test_a_full_batch_changes_no_bit(engine, alone):
    crowd = strangers(4, seed=1, n=3)
    found = rows(engine.generate([*crowd[:2], *requests(), *crowd[2:]]))
    assert len(found) > GEOMETRY.slots
    assert ours(found, alone) == alone


def test_no_slot_and_no_earlier_tenant_of_it_changes_a_bit(engine, alone):
    """Each request in each slot, among other neighbours each time, after rows that had filled the whole cache."""
    full = [Request(f"full {i}", tokens(i, 1), SamplingParams(max_new_tokens=99, ignore_eos=True)) for i in range(8)]
    assert {len(group.completions[0].completion_tokens) for group in engine.generate(full)} == {63}
    visited = {name: set() for name in POLICIES}
    for turn in range(100):  # prompts that are read sooner get their slots sooner, so turns alone do not reach them all
        line = [*requests(), *strangers(GEOMETRY.slots - len(POLICIES), seed=10 + turn)]
        engine.abort()  # slots are given out from the first to the last again
        engine._free = engine._free[turn % GEOMETRY.slots :] + engine._free[: turn % GEOMETRY.slots]
        for request in line[turn % 3 :] + line[: turn % 3]:
            engine.submit(request)
        found = engine.step()
        for slot, resident in engine._resident.items():
            if resident.group.request.prompt_id in visited:
                visited[resident.group.request.prompt_id].add(slot)
        while not engine.idle:
            found += engine.step()
        assert ours(rows(found), alone) == alone
        if all(len(slots) == GEOMETRY.slots for slots in visited.values()):
            break
    assert all(slots == set(range(GEOMETRY.slots)) for slots in visited.values()), visited


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_arrival_changes_a_bit(engine, alone, seed):
    """All at once or while others are under way, before and after strangers."""
    rng = np.random.default_rng(seed)
    line = [*requests(), *strangers(6, seed=20 + seed)]
    found = []
    for place in rng.permutation(len(line)):
        engine.submit(line[place])
        if rng.random() < 0.4:
            found += engine.step()
    while not engine.idle:
        found += engine.step()
    assert ours(rows(found), alone) == alone


def test_more_samples_change_none_that_were_there(engine, alone):
    eight = rows(engine.generate(requests(n=8)))
    assert len(eight) == 8 * len(POLICIES)
    assert ours(eight, alone) == alone
    two = rows(engine.generate(requests(n=2)))
    assert ours(eight, two) == two
    assert len({eight["plain", sample]["completion_tokens"] for sample in range(8)}) == 8


def test_b039_taken_up_at_every_token_a_row_goes_on_as_it_did(engine, alone):
    """Case B039 at every step: what was drawn before counts as drawn, and the stream of draws is not begun again."""
    for request in requests():
        (group,) = engine.generate([request])
        (row,) = group.completions
        lengths = range(row.completion_tokens.size + 1)
        again = Request(
            request.prompt_id,
            request.prompt_tokens,
            request.params,
            sample_indices=tuple(lengths),
            given=tuple(row.completion_tokens[:length] for length in lengths),
            keys=(row.key,) * len(lengths),
        )
        for name, found in rows(engine.generate([again])).items():
            assert found == alone[request.prompt_id, 0], name


@pytest.mark.slow
def test_another_process_that_compiles_anew_draws_the_same_bits(checkpoint, tmp_path):
    command = [sys.executable, "-m", "tests.rollout.exact_work", checkpoint, "float32"]
    anew = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=anew, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert any(tmp_path.iterdir()), "nothing was compiled"
    assert done.stdout.strip() == digest(rows(make_engine(checkpoint, "float32").generate(requests())))


@pytest.fixture(scope="module")
def run(local_ray, checkpoint, tmp_path_factory):
    """Makes runs of the requests, each once: `n` samples of each, on so many workers."""
    folders = {}

    def make(workers: int = 1, dtype: str = "float32", n: int = 2, disturbed: bool = False) -> Path:
        name = f"{workers}-{dtype}-{n}-{disturbed}"
        if name not in folders:
            prompts = [
                {"id": prompt_id, "prompt_tokens": PROMPTS[prompt_id].tolist(), "sampling": POLICIES[prompt_id]}
                for prompt_id in POLICIES
            ]
            if disturbed:
                others = strangers(9, seed=30)
                prompts = prompts[::-1] + [
                    {"id": o.prompt_id, "prompt_tokens": o.prompt_tokens.tolist()} for o in others
                ]
                prompts = prompts[7:] + prompts[:7]
            config = parse_config(
                {
                    "model": {"checkpoint": checkpoint, "dtype": dtype},
                    "geometry": vars(GEOMETRY),
                    "prompts": {"source": "inline", "rows": prompts},
                    "sampling": {"n": n, "max_new_tokens": 30},
                    "workers": {"count": workers, "cpus": 0, "threads": int(os.environ["NPROC"])},
                    "seed": SEED,
                    "output": {"rows_per_shard": 6},
                }
            )
            folders[name] = tmp_path_factory.mktemp("runs") / name
            sample_run(config, folders[name])
        return folders[name]

    return make


def recorded(folder: Path) -> dict[tuple[str, int], dict[str, str]]:
    return {(row.prompt_id, row.sample_index): bits(row) for row in read_trajectories(folder)}


@pytest.mark.ray
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_records_what_an_engine_of_equal_numerics_draws(run, checkpoint, dtype):
    """The same fingerprint in another process, under a worker: the same bits, on disk."""
    folder = run(dtype=dtype)
    assert list(read_manifest(folder).numerics) == [fingerprint_digest(numerics_fingerprint(GEOMETRY, dtype))]
    here = make_engine(checkpoint, dtype)
    assert recorded(folder) == rows(here.generate(requests(n=2)))


@pytest.mark.ray
def test_one_two_and_three_workers_write_one_content(run):
    hashes = {}
    for count in (1, 2, 3):
        folder = run(workers=count)
        assert {row.worker for row in read_trajectories(folder)} == {f"worker-{i}" for i in range(count)}
        hashes[count] = content_hash(read_trajectories(folder))
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.ray
def test_a_larger_run_holds_the_smaller_one_record_by_record(run):
    """Eight samples for two, two workers for one, other prompts beside them, and all of it in another order."""
    small, large = recorded(run()), recorded(run(workers=2, n=8, disturbed=True))
    assert len(small) == 2 * len(POLICIES) and len(large) == 8 * (len(POLICIES) + 9)
    assert list(ours(large, small)) != [name for name in large if name in small]
    for name, row in small.items():
        assert large[name] == row, name


@pytest.mark.ray
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fresh_process_verifies_a_run_from_disk(run, dtype):
    folder = run(dtype=dtype)
    command = [sys.executable, "-m", "rollout.cli", "verify", str(folder), "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = read_manifest(folder)
    assert f"{manifest.rows} samples, {manifest.tokens} tokens compared bit for bit: 0 faults" in done.stdout
