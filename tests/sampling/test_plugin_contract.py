"""What plugins have to be: how they are named, loaded, and held to their contract before anything is drawn."""

import os
import random
import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sampling import Engine, load_checkpoint
from sampling.errors import ConfigError
from sampling.plugins import PluginRef, PluginRefs, load_plugins
from sampling.plugins.contract import require_contract, require_rows_apart
from tests.example_plugin.example_plugin import Cooler, SameToken
from tests.sampling.test_plugins import GEOMETRY, PLUGINS
from tests.tiny_models import tiny_llama


def loaded(kind, *uses):
    return load_plugins(PluginRefs.of({kind: uses}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"transforms": "cooler"}, r"plugins\.transforms: expected a list, got 'cooler'"),
        ({"filters": []}, r"plugins\.filters: no such key; known are transforms, stopping"),
        ({"transforms": [{"name": "a"}]}, r"transforms\[0\]\.use: missing"),
        ({"transforms": [{"use": "a:B", "after": "top_p"}]}, r"transforms\[0\]\.after: no such key"),
        ({"transforms": [{"use": "a:B", "before": "top"}]}, r"transforms\[0\]\.before: expected a stage, one of"),
        ({"stopping": [{"use": "a:B", "before": "top_p"}]}, r"stopping\[0\]\.before: a stopping rule has no place"),
        ({"transforms": ["a b"]}, r"transforms\[0\]\.use: expected package\.module:name, or the name of an entry"),
        ({"transforms": [Cooler()]}, r"expected a class or a function, got an object of Cooler; give the class"),
        ({"transforms": [{"use": "a:B", "name": "top_p"}]}, r"'top_p' is a stage or a parameter already"),
        ({"transforms": [lambda state, logits: logits]}, r"name: expected letters.* got '<lambda>'; give it a name"),
        ({"transforms": ["a:B"], "stopping": ["c:B"]}, r"stopping\[0\]\.name: 'b' is that of plugins\.transforms\[0\]"),
    ],
)
def test_declarations_that_cannot_be_are_refused_before_anything_is_imported(values, message):
    with pytest.raises(ConfigError, match=message):
        PluginRefs.of(values)


def test_declarations_read_back_what_they_write():
    refs = PluginRefs.of(
        {"transforms": ["a.b:SomeThing", {"use": "x", "name": "y", "version": "1"}], "stopping": ["z"]}
    )
    assert refs.transforms == (PluginRef("a.b:SomeThing", "some_thing"), PluginRef("x", "y", version="1"))
    assert PluginRefs.of(refs.to_dict()) == refs and PluginRefs.of(None) == PluginRefs.of({}) == PluginRefs()
    pinned = load_plugins(PluginRefs.of(PLUGINS)).refs
    assert all(ref.version for _, _, ref in pinned)
    other = PluginRef(f"{SameToken.__module__}:SameToken", version="7")
    with pytest.raises(ConfigError, match=r"stopping\[0\] same_token: expected version 7, here is .*; install"):
        load_plugins(PluginRefs(stopping=(other,)))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of foreign code that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    names = iter(f"foreign_{tmp_path.name}_{i}".replace("-", "_") for i in range(9))

    def write(text):
        name = next(names)
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


@pytest.mark.parametrize(
    ("code", "attribute", "message"),
    [
        ("import nowhere_at_all", "X", "module .* cannot be imported: ModuleNotFoundError: No module named 'nowhere"),
        ("1 / 0", "X", "cannot be imported: ZeroDivisionError: division by zero"),
        ("def other(): ...", "f", "has no f; check the name after the colon"),
        ("f = 3", "f", "expected a class whose objects are called .* got 3"),
        ("class f: pass", "f", r"expected a class whose objects are called with \(state, logits\)"),
        ("def f(logits): return logits", "f", "too many positional arguments"),
        ("async def f(state, logits): return logits", "f", "got one that is async"),
        ("def f(state, logits, scale): return logits", "f", "too few|missing a required argument: 'scale'"),
        ("def f(state, logits, scale='a'): return logits", "f", "parameter scale: expected a bool, .* got 'a'"),
        ("def f(state, logits, *scales): return logits", "f", r"expected parameters with names .* got \*scales"),
        ("def f(state, logits, version=1): return logits", "f", "no parameter can be called version"),
        ("def f(state, logits): return logits\nf.version = 3", "f", "version: expected text, got 3"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_cause(module, code, attribute, message):
    name = module(code)
    with pytest.raises(ConfigError, match=message) as caught:
        loaded("transforms", f"{name}:{attribute}")
    assert str(caught.value).startswith("plugins.transforms[0]")


def test_an_entry_point_that_nobody_offers_is_refused():
    with pytest.raises(ConfigError, match=r"expected the name of one entry point of the group rollout\.stopping, inst"):
        loaded("stopping", "never_offered")


def test_code_of_no_package_has_a_digest_as_its_version(module):
    name = module("def f(state, logits): return logits")
    (plugin,) = loaded("transforms", f"{name}:f")
    assert plugin.ref.version.startswith("sha256:") and len(plugin.ref.version) == 19


def integers(state, logits):
    return logits.astype(jnp.int32)


def transposed(state, logits):
    return logits.T


def pair(state, logits):
    return state, logits


def nothing(state, logits):
    return None


def branching(state, logits):
    return logits if state.step[0] > 3 else logits / 2


def on_the_host(state, logits):
    return jnp.asarray(np.asarray(logits) / 2)


def called_back(state, logits):
    return jax.pure_callback(lambda scores: scores, jax.ShapeDtypeStruct(logits.shape, logits.dtype), logits)


def printed(state, logits):
    jax.debug.print("{}", logits[0, 0])
    return logits


def drawn_on_the_host(state, logits):
    return logits * random.random()


def writes(state, logits):
    object.__setattr__(state, "buffer", state.buffer + 1)
    return logits


def assigns(state, logits):
    state.length = state.length + 1
    return logits


def fails(state, logits):
    raise KeyError("scale")


class Counting:
    """Keeps count in its class, as host-stateful processors do."""

    calls = 0

    def __call__(self, state, logits):
        Counting.calls += 1
        return logits * Counting.calls


@dataclass(frozen=True)
class WordyNeutral:
    strength: float = 1.0

    def is_neutral(self):
        return jnp.asarray(self.strength)

    def __call__(self, state, logits):
        return logits


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (integers, r"expected scores float32 \[4, 32\], as it was given; got int32 \[4, 32\]"),
        (transposed, r"expected scores float32 \[4, 32\], as it was given; got float32 \[32, 4\]"),
        (pair, r"expected scores float32 \[4, 32\], as it was given; got tuple"),
        (nothing, r"expected scores float32 \[4, 32\], as it was given; got NoneType"),
        (branching, r"asks for values on the host: .* one compiled loop .*\(jnp\.where in place of if\)"),
        (on_the_host, r"asks for values on the host: .* find what it has to remember in the state"),
        (called_back, r"works on the host or has side effects \(pure_callback\)"),
        (printed, r"works on the host or has side effects \(debug_"),
        (drawn_on_the_host, r"another program the second time, .* Randomness of a row comes from state\.keys"),
        (Counting, "another program the second time, so it keeps state"),
        (writes, r"it changes state\.buffer; tokens and what is counted of them are not its to change"),
        (assigns, r"it cannot be called: FrozenInstanceError"),
        (fails, r"it cannot be called: KeyError: 'scale'"),
        (WordyNeutral, r"is_neutral: expected bool \[4\], or of no axis; got float32 \[4\]"),
    ],
)
def test_what_breaks_the_contract_is_refused_before_anything_is_drawn(use, message):
    plugins = loaded("transforms", use)
    with pytest.raises(ConfigError, match=message) as caught:
        require_contract(plugins, 32)
    assert str(caught.value).startswith(f"plugins.transforms {plugins.loaded[0].name}: ")


def test_the_contract_is_checked_without_a_device():
    code = (
        "from sampling.plugins import PluginRefs, load_plugins\n"
        "from sampling.plugins.contract import require_contract\n"
        "names = ['tests.example_plugin.example_plugin:Cooler', 'tests.example_plugin.example_plugin:no_echo']\n"
        "require_contract(load_plugins(PluginRefs.of({'transforms': names})), 32)\n"
        "import jax; print('checked'); jax.devices()"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "nowhere"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout == "checked\n" and "nowhere" in done.stderr and done.returncode == 1


def counts(state, tokens):
    return state.step


def test_a_rule_says_for_each_row_whether_it_ends():
    with pytest.raises(ConfigError, match=r"stopping counts: expected bool \[4\], which rows end; got int32 \[4\]"):
        require_contract(loaded("stopping", counts), 32)


def mixing(state, logits):
    return logits - jnp.mean(logits)


def by_place(state, logits):
    return logits + jnp.arange(logits.shape[0], dtype=jnp.float32)[:, None]


def all_or_none(state, tokens):
    return jnp.broadcast_to(jnp.all(state.step > 2), tokens.shape)


@dataclass(frozen=True)
class Strongest:
    """Gives all rows the parameter of one."""

    strength: jax.Array | float = 1.0

    def __call__(self, state, logits):
        return logits * jnp.max(jnp.asarray(self.strength))


@pytest.mark.parametrize(
    ("kind", "use"),
    [("transforms", mixing), ("transforms", by_place), ("transforms", Strongest), ("stopping", all_or_none)],
)
def test_what_lets_rows_depend_on_each_other_is_refused(kind, use):
    plugins = loaded(kind, use)
    require_contract(plugins, 32)
    with pytest.raises(ConfigError, match="a row's result depends on the rows beside it"):
        require_rows_apart(plugins, 32)


def by_number(state, logits):
    return logits + logits.shape[0]


def test_what_differs_between_programs_of_other_widths_is_refused():
    plugins = loaded("transforms", by_number)
    require_contract(plugins, 32)
    require_rows_apart(plugins, 32, (8,))
    with pytest.raises(ConfigError, match="or on how many there are"):
        require_rows_apart(plugins, 32, (8, 12))


def test_the_example_keeps_to_the_contract():
    plugins = load_plugins(PluginRefs.of(PLUGINS))
    require_contract(plugins, 32)
    require_rows_apart(plugins, 32, (8, 32, 40))
    assert [plugin.argmax_invariant for plugin in plugins] == [True, False, False]


def test_an_engine_refuses_a_plugin_when_it_is_made(tmp_path):
    checkpoint = load_checkpoint(tiny_llama(tmp_path))
    for use, message in ((mixing, "depends on the rows beside it"), (branching, "values on the host")):
        with pytest.raises(ConfigError, match=message):
            Engine(checkpoint, GEOMETRY, plugins={"transforms": [use]})
