"""`rollout train` with plugins: rules end what is learnt from, transforms serve evaluations alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rollout.codec import read_parquet
from rollout.config_file import validated
from rollout.learning.loop import train_run
from rollout.learning.train_config import TrainConfig, load_train_config
from sampling.errors import ConfigError
from sampling.types import StopReason

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

EXAMPLE = Path(__file__).parents[1] / "example_plugin"
RULE = {"plugins": {"same_token": {"times": 1}}}


@pytest.fixture
def config(monkeypatch):
    """Makes configs of a tiny run from the toy's."""
    monkeypatch.syspath_prepend(EXAMPLE)
    toy = yaml.safe_load(Path("configs/toy-grpo.yaml").read_text())

    def make(**sampling) -> TrainConfig:
        plugins = {
            "transforms": [{"use": "example_plugin:no_echo", "name": "no_echo"}],
            "stopping": [{"use": "example_plugin:SameToken", "name": "same_token"}],
        }
        held_out = {"max_new_tokens": 4, "plugins": {"no_echo": {"penalty": 5.0}}}
        sections = {
            "plugins": plugins,
            "sampling": toy["sampling"] | {"n": 8, "max_new_tokens": 4} | sampling,
            "train": {"steps": 2, "prompts_per_step": 2},
            "evaluation": toy["evaluation"] | {"sampling": held_out},
        }
        return validated(TrainConfig, toy | sections, "toy-grpo.yaml")

    return make


def test_rules_end_what_is_learnt_from(config, tmp_path):
    train_run(config(**RULE), tmp_path / "run")
    for step in range(2):
        rows = list(read_parquet(tmp_path / "run" / "trajectories" / f"step-{step:06d}.parquet"))
        assert len(rows) == 16 and all(row.stop_reason is StopReason.PLUGIN for row in rows)
        (settings,) = {str(row.policy["plugins"]) for row in rows}
        assert "'times': 1" in settings and "'version': 'sha256:" in settings
    evaluated = list(read_parquet(tmp_path / "run" / "evaluations" / "step-000000.parquet"))
    assert {row.policy["plugins"]["no_echo"]["penalty"] for row in evaluated} == {5.0}
    kept = load_train_config(tmp_path / "run" / "config.yaml")
    assert all(ref.version.startswith("sha256:") for _, _, ref in kept.plugins)
    assert len(train_run(kept, tmp_path / "run").lines) == 2  # nothing is left to do


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"plugins": {"no_echo": {}}}, "sampling.plugins = .*no_echo.*: expected its default"),
        ({"plugins": {"same_token": {"times": 0}}}, "sampling.plugins.same_token: times: expected 1 .. "),
        ({"plugins": {"same_token": {"time": 1}}}, "same_token.time: no such parameter; did you mean times"),
    ],
)
def test_what_cannot_be_used_is_refused_before_workers_start(config, tmp_path, sampling, message):
    with pytest.raises(ConfigError, match=message):
        train_run(config(**sampling), tmp_path / "run")
