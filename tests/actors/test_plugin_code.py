"""How the code of plugins gets to workers: by the path on which it lies, or carried to a cluster that is joined."""

import os
import socket
import sys

import pytest

from actors import Placement
from actors.cluster import connected, worker_options
from sampling.plugins import PluginRefs, load_plugins

FUNCTION = "def same(state, logits): return logits\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with a package that has metadata, as pip leaves it, and with a module that has none."""
    folder = tmp_path / "site"
    (folder / "carried_package").mkdir(parents=True)
    (folder / "carried_package" / "__init__.py").write_text(FUNCTION)
    (folder / "carried_module.py").write_text(FUNCTION)
    metadata = folder / "carried_package-3.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: carried-package\nVersion: 3.1\n")
    (metadata / "RECORD").write_text("carried_package/__init__.py,,\n")
    (metadata / "entry_points.txt").write_text("[rollout.transforms]\ncarried = carried_package:same\n")
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in ("carried_package", "carried_module"):
        sys.modules.pop(name, None)


def refs():
    plugins = ["carried", {"use": "carried_module:same", "name": "other"}, {"use": "click:echo", "name": "installed"}]
    return PluginRefs.of({"transforms": plugins})


@pytest.mark.ray
def test_workers_on_this_machine_are_told_the_path(site, local_ray):
    path = worker_options(Placement(), refs())["runtime_env"]["env_vars"]["PYTHONPATH"].split(os.pathsep)
    assert path.count(str(site)) == 1 and not any(place.endswith("site-packages") for place in path)
    assert str(site) not in worker_options(Placement())["runtime_env"]["env_vars"].get("PYTHONPATH", "")


def test_a_cluster_that_is_joined_is_sent_the_code(site, monkeypatch):
    seen = {}
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("ray.init", lambda **settings: seen.update(settings))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with connected(address, Placement(), load_plugins(PluginRefs(refs().transforms[:2])).refs) as there:
            pass
    sent = seen["runtime_env"]["py_modules"]
    assert [str(site / name) for name in ("carried_package", "carried_module.py")] == sent[-2:]
    # There no metadata tells an entry point, or the version: both are told as they were found here.
    assert [(ref.use, ref.carried) for ref in there.transforms] == [
        ("carried_package:same", True),
        ("carried_module:same", True),
    ]
    assert there.transforms[0].version == "3.1"
    (site / "carried_package-3.1.dist-info" / "METADATA").unlink()
    assert load_plugins(there).loaded[0].ref.version == "3.1"
