"""`rollout bench chaos`: a disturbed run that draws the same passes; one that does not, or was not disturbed, fails."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from rollout.bench_chaos import compare_runs
from rollout.cli import main
from rollout.config_file import dump_config
from rollout.driver import sample_run
from rollout.status import read_status
from sampling.errors import ConfigError, RunError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

QUICK = {"count": 2, "cpus": 0, "threads": 1, "heartbeat_s": 1}


def test_a_disturbed_run_draws_the_same(tiny_config, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(dump_config(tiny_config(workers=QUICK)))
    arguments = ["bench", "chaos", str(config), "--out", str(tmp_path / "runs"), "--json", str(tmp_path / "found")]
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0, shown.output
    found = json.loads((tmp_path / "found").read_text())
    assert found["disturbed"] == found["undisturbed"] == read_status(tmp_path / "runs" / "disturbed").content_hash
    assert {fault.partition(":")[0] for fault in found["happened"]} == {"kill", "stall", "slow", "write"}
    (ended,) = found["ended"]
    assert "No space left on device (chaos); what was committed before is safe" in ended
    assert found["extra_work"] < 1
    assert f"undisturbed  {found['undisturbed']}" in shown.stdout and shown.stdout.endswith("passed\n")


def test_a_fault_that_does_not_come_about_is_one(tiny_config):
    found = compare_runs(tiny_config(), ["kill:worker=0,after=500"])
    assert found.undisturbed == found.disturbed and found.happened == ()
    assert found.faults == ("did not come about: kill:worker=0,after=500; the job is too small for it",)
    assert found.lines()[-1] == "failed: 1 faults"


def test_a_folder_that_is_there_is_refused(tiny_config, tmp_path):
    with pytest.raises(ConfigError, match="expected a new folder"):
        compare_runs(tiny_config(), (), tmp_path)


@pytest.fixture(scope="module")
def undisturbed(local_ray, tmp_path_factory):
    """The content hash of a run that nothing disturbs, made when first asked for."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"

    def make(config):
        if not folder.exists():
            sample_run(config, folder)
        return read_status(folder).content_hash

    return make


@pytest.mark.parametrize(("after", "file"), [(0, "config"), (2, "manifest"), (5, "part-00001"), (6, "manifest")])
def test_whatever_write_fails_the_next_start_finishes_the_run(tiny_config, tmp_path, undisturbed, after, file):
    with pytest.raises(RunError, match=rf"{file}.* cannot be written: No space left on device \(chaos\)"):
        sample_run(tiny_config(), tmp_path / "run", chaos=[f"write:after={after}"])
    sample_run(tiny_config(), tmp_path / "run")
    assert read_status(tmp_path / "run").content_hash == undisturbed(tiny_config())
