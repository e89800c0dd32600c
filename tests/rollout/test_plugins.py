"""Plugins through the whole service: an installed package, and objects; in workers, records and every command."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from actors import Placement
from rollout import Geometry, Rollouts, SamplingParams
from rollout.cli import main
from rollout.config_file import load_config
from rollout.driver import sample_run
from rollout.explain import RunExplainer
from rollout.scoring.config import load_score_config
from rollout.scoring.folder import SCORED_NAME
from rollout.scoring.job import score_source
from rollout.scoring.scored import Outcome, read_scored
from rollout.shards import read_trajectories
from rollout.verify import verify_run
from sampling.errors import ConfigError, PromptError
from sampling.types import StopReason

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

EXAMPLE = Path(__file__).parents[1] / "example_plugin"
PLUGINS = {"transforms": ["cooler", {"use": "example_plugin:no_echo", "before": "greedy"}], "stopping": ["same_token"]}
PROMPTS = {
    "plain": {},
    "cooled": {"plugins": {"cooler": {"strength": 0.5}}},
    "both": {"plugins": {"cooler": {"strength": 0.2}, "no_echo": {"penalty": 4.0}}},
    "greedy": {"plugins": {"no_echo": {}}, "temperature": 0},
    "ended": {"plugins": {"same_token": {"times": 1}}},
}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The folder into which the example was installed."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*install, "--target", folder / "site", source], check=True, timeout=120)
    return folder / "site"


@pytest.fixture
def use_folder(monkeypatch):
    """Makes Python find the example in one folder, or nowhere."""

    def use(folder):
        monkeypatch.setattr(sys, "path", [place for place in sys.path if not place.endswith("/site")])
        if folder is not None:
            monkeypatch.syspath_prepend(folder)
        importlib.invalidate_caches()
        sys.modules.pop("example_plugin", None)

    yield use
    sys.modules.pop("example_plugin", None)


@pytest.fixture
def installed(package, use_folder):
    use_folder(package)
    return package


@pytest.fixture
def config(tiny_config):
    rows = [{"id": name, "prompt": "abcabc", "n": 2, "sampling": policy} for name, policy in PROMPTS.items()]
    return tiny_config(
        plugins=PLUGINS,
        prompts={"source": "inline", "rows": rows},
        sampling={"max_new_tokens": 10, "ignore_eos": True},
        workers={"count": 1, "cpus": 0, "threads": int(os.environ["NPROC"])},
    )


@pytest.fixture
def run(installed, finished, config):
    return finished(config)


def test_a_run_records_name_version_and_parameters(run):
    records = {(record.prompt_id, record.sample_index): record for record in read_trajectories(run)}
    assert len(records) == 2 * len(PROMPTS) and not any(record.failed for record in records.values())
    assert records["plain", 0].policy["plugins"] == {}
    assert records["both", 1].policy["plugins"] == {
        "cooler": {"strength": 0.2, "version": "0.1.0"},
        "no_echo": {"penalty": 4.0, "version": "0.1.0"},
    }
    assert records["ended", 0].stop_reason is StopReason.PLUGIN and records["ended", 0].completion_len == 1
    kept = load_config(run / "config.yaml").plugins
    assert [(ref.name, ref.version) for _, _, ref in kept] == [
        ("cooler", "0.1.0"),
        ("no_echo", "0.1.0"),
        ("same_token", "0.1.0"),
    ]


def test_a_run_with_plugins_is_verified_to_the_bit_and_continued(run, config):
    found = verify_run(run)
    assert found.faults == [] and found.bit_exact and found.samples == 2 * len(PROMPTS)
    assert sample_run(config, run).already_finished


def test_every_token_is_explained(run):
    explainer = RunExplainer(run)
    for name in PROMPTS:
        report = explainer.explain(name, 1, -1)
        assert not [fault for fault in report.faults], name
        used = set(PROMPTS[name].get("plugins", {}))
        shown = {stage.name for stage in report.explanation.stages} | {rule.name for rule in report.explanation.rules}
        assert used <= shown
    done = CliRunner().invoke(main, ["explain", str(run), "--prompt", "both", "--sample", "0", "--token", "3"])
    assert done.exit_code == 0, done.output
    assert "cooler strength 0.2, version 0.1.0" in done.output


@pytest.mark.parametrize("path", ["replay", "forward"])
def test_a_run_with_plugins_is_scored_under_its_own_policies(run, tmp_path, path):
    score_source(run, load_score_config(run, None, [f"path={path}"]), tmp_path / "scored")
    files = sorted((tmp_path / "scored" / SCORED_NAME / "default").glob("*.parquet"))
    scored = [row for file in files for row in read_scored(file)]
    for record, row in zip(read_trajectories(run), scored, strict=True):
        assert row.outcome is Outcome.SCORED
        apart = np.abs(row.behaviour_logprobs - record.behaviour_logprobs)
        assert (apart == 0).all() if path == "replay" else np.median(apart) < 1e-4


def refusals(run, tmp_path):
    """What each command that needs the run's plugins says."""
    for command in (
        lambda: verify_run(run),
        lambda: RunExplainer(run).explain("plain", 0, 0),
        lambda: score_source(run, load_score_config(run), tmp_path / "scored"),
        lambda: sample_run(load_config(run / "config.yaml"), run),
    ):
        with pytest.raises(ConfigError) as caught:
            command()
        yield str(caught.value)


def test_without_the_plugin_nothing_is_verified_explained_scored_or_continued(run, tmp_path, use_folder):
    use_folder(None)
    for message in refusals(run, tmp_path):
        assert message.startswith("plugins.transforms[0]: cooler: expected the name of one entry point of the group")
    done = CliRunner().invoke(main, ["verify", str(run)])
    assert done.exit_code == 2 and "install the package that offers it" in done.output


def test_another_version_is_refused(run, package, tmp_path, use_folder):
    other = shutil.copytree(package, tmp_path / "site")
    (metadata,) = other.glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("Version: 0.1.0", "Version: 0.2.0"))
    use_folder(other)
    for message in refusals(run, tmp_path):
        assert message.startswith("plugins.transforms[0] cooler: expected version 0.1.0, here is 0.2.0")


def test_a_policy_that_asks_for_the_impossible_is_refused_before_workers_start(installed, config, tmp_path):
    for plugins, message in (
        ({"cooler": {"strength": -1}}, r"sampling\.plugins\.cooler: strength: expected at least 0, got -1"),
        ({"warmer": {}}, r"plugins\.warmer: no such plugin, known are cooler, no_echo, same_token"),
    ):
        rows = [{"id": "a", "prompt": "abc", "sampling": {"plugins": plugins}}]
        wrong = config.model_copy(update={"prompts": config.prompts.model_copy(update={"rows": tuple(rows)})})
        with pytest.raises((ConfigError, PromptError), match=message):
            sample_run(wrong, tmp_path / "run")


def test_objects_travel_to_workers(tiny_checkpoint):
    def only_low(state, logits, below: int = 100):
        ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
        return jnp.where(ids[None, :] < jnp.asarray(below)[:, None], logits, -jnp.inf)

    class Every:
        """Ends rows of so many tokens."""

        version = "1"

        def __init__(self, tokens: int = 3) -> None:
            self.tokens = tokens

        def __call__(self, state, tokens):
            return state.step >= self.tokens

    placement, geometry = Placement(cpus=0, threads=1), Geometry(slots=4, cache_len=64, prefill_chunk=16)
    plugins = {"transforms": [only_low], "stopping": [Every]}
    with Rollouts(tiny_checkpoint, workers=placement, geometry=geometry, plugins=plugins) as rollouts:
        params = SamplingParams(max_new_tokens=9, ignore_eos=True)
        chosen = params.replace(plugins={"only_low": {"below": 20}, "every": {"tokens": 5}})
        ((free,),), ((row,),) = (list(rollouts.sample(["abc"], asked, seed=3)) for asked in (params, chosen))
    assert free.completion_len == 9 and (free.completion_tokens >= 20).any()
    assert row.completion_len == 5 and (row.completion_tokens < 20).all() and row.stop_reason is StopReason.PLUGIN
    assert row.policy["plugins"]["every"] == {"tokens": 5, "version": "1"}
    assert row.policy["plugins"]["only_low"]["version"].startswith("sha256:")
