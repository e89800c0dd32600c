"""A tiny checkpoint and a config that samples it; Ray is started once, when the first test needs it."""

from __future__ import annotations

import pytest

from rollout.config import RunConfig
from rollout.config_file import parse_config
from rollout.driver import sample_run
from tests.local_ray import local_ray  # noqa: F401, a fixture
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("checkpoint") / "llama"))


@pytest.fixture
def tiny_config(tiny_checkpoint):
    """Makes configs of a small run: 12 prompts, 1 to 3 samples of each, mixed policies."""

    def make(**sections) -> RunConfig:
        base = {
            "model": {"checkpoint": tiny_checkpoint},
            "geometry": {"slots": 4, "cache_len": 64, "prefill_chunk": 16},
            "prompts": {"source": "inline", "rows": [prompt_row(index) for index in range(12)]},
            "sampling": {"max_new_tokens": 12, "top_p": 0.9},
            "workers": {"count": 1, "cpus": 0, "threads": 1},
            "seed": 5,
            "output": {"rows_per_shard": 6},
        }
        return parse_config(base | sections)

    return make


@pytest.fixture(scope="module")
def finished(local_ray, tmp_path_factory):  # noqa: F811, the fixture
    """Gives the folder of an undisturbed run, made when first asked for."""
    folder = tmp_path_factory.mktemp("runs") / "finished"

    def make(config):
        if not folder.exists():
            sample_run(config, folder)
        return folder

    return make


def prompt_row(index: int) -> dict:
    return {
        "id": f"p{index}",
        "prompt": "abc" * (1 + index % 3),
        "n": 1 + index % 3,
        "sampling": {"temperature": (1.0, 0.0, 0.5)[index % 3], "max_new_tokens": 4 + index},
        "metadata": {"index": index},
    }
