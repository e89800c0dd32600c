"""A worker that is given several devices cuts its model among them, and what it records can be drawn again there.

1. Its records name the number of devices, and `rollout verify` finds every bit again with as many.
2. So does `rollout explain`, for one token.
3. On one device the numerics are others: both say so, and compare within their bounds.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rollout.manifest import read_manifest
from tests.rollout.exact_work import GEOMETRY, POLICIES, PROMPTS, SEED
from tests.sampling.test_mesh import FOUR
from tests.tiny_models import tiny_llama

ROOT = Path(__file__).parents[2]


def command(*arguments: object, flags: str) -> str:
    """What a command prints, in a process and a Ray of its own whose workers find these flags in their environment."""
    done = subprocess.run(
        [sys.executable, "-m", "rollout.cli", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    checkpoint = tiny_llama(folder / "llama", num_attention_heads=8, num_key_value_heads=4)
    rows = [
        {"id": name, "prompt_tokens": PROMPTS[name].tolist(), "sampling": policy} for name, policy in POLICIES.items()
    ]
    config = {
        "model": {"checkpoint": str(checkpoint)},
        "geometry": vars(GEOMETRY),
        "prompts": {"source": "inline", "rows": rows},
        "sampling": {"n": 2, "max_new_tokens": 30},
        "workers": {"count": 1, "cpus": 0, "threads": int(os.environ["NPROC"])},
        "seed": SEED,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command("sample", folder / "config.yaml", "--out", folder / "run", "--quiet", flags=FOUR)
    return folder / "run"


@pytest.mark.ray
def test_a_worker_uses_all_its_devices_and_verify_finds_every_bit_again(run):
    manifest = read_manifest(run)
    (numerics,) = manifest.numerics.values()
    assert numerics["num_devices"] == 4 and numerics["xla_flags"] == FOUR
    assert manifest.rows == 2 * len(POLICIES)
    said = command("verify", run, "--quiet", flags=FOUR)
    assert f"{manifest.rows} samples, {manifest.tokens} tokens compared bit for bit: 0 faults" in said


@pytest.mark.ray
@pytest.mark.parametrize(("flags", "same"), [(FOUR, True), ("", False)])
def test_a_token_is_explained_on_as_many_devices_if_there_are_so_many(run, flags, same):
    said = command("explain", run, "--prompt", "filters", "--sample", 1, "--token", 5, flags=flags)
    assert ("the numerics are not the run's" not in said) == same


@pytest.mark.ray
def test_on_one_device_the_numerics_are_others(run):
    assert "the numerics being others: 0 faults" in command("verify", run, "--quiet", flags="")
