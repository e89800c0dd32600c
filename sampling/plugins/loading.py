"""Plugins: what PluginRefs name, loaded, with the version of each and the parameters that rows may give it.

A plugin is a class or a function whose parameters all have a number as their default. An object of the class, or the
function with the parameters bound, is called as a built-in stage is; every parameter is then an array [rows].
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.metadata
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sampling.errors import ConfigError
from sampling.param_checks import short
from sampling.params import SamplingParams
from sampling.plugins.refs import REFERENCE, PluginKind, PluginRef, PluginRefs
from sampling.references import referenced

VERSION = "version"
"""The key beside a plugin's parameters under which a record holds its version."""

DTYPES = {bool: np.bool_, int: np.int32, float: np.float32}
"""A parameter's dtype, by the type of its default."""


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin.

    Attributes:
        kind: what it is.
        ref: how it was named, its version pinned.
        target: the class or function.
        defaults: its parameters with their defaults, each a bool, an int or a float.
    """

    kind: PluginKind
    ref: PluginRef
    target: Callable[..., Any]
    defaults: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """By which rows name it."""
        return self.ref.name

    @property
    def argmax_invariant(self) -> bool:
        """It says that the best token of every row stays the best."""
        return getattr(self.target, "argmax_invariant", False) is True

    def made(self, values: Mapping[str, Any]) -> Callable[..., Any]:
        """What is called with (state, logits) or (state, tokens).

        Args:
            values: of its parameters, scalars or [rows].
        """
        bound = functools.partial(self.target, **values)
        return bound() if inspect.isclass(self.target) else bound

    def leaves(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Every parameter as a NumPy scalar, the default where `settings` has none."""
        return {name: DTYPES[type(default)](settings.get(name, default)) for name, default in self.defaults}

    def settings(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """What a row gives it, with everything that it leaves out, and the version.

        Raises:
            ConfigError: there is no such parameter, the plugin is of another version, or it refuses a value.
        """
        defaults = dict(self.defaults)
        version = given.get(VERSION, self.ref.version)
        if version != self.ref.version:
            raise ConfigError(
                f"{where}.{VERSION}: expected {version}, here is {self.ref.version}; install the version that is asked"
                " for, the record's own if it is to be drawn again"
            )
        for name in given:
            if name not in defaults and name != VERSION:
                raise ConfigError(f"{where}.{name}: no such parameter; {_known(name, defaults)}")
        values = {name: _typed(given.get(name, default), default, f"{where}.{name}") for name, default in self.defaults}
        if check := getattr(self.target, "check", None):
            try:
                check(**values)
            except Exception as error:  # foreign code
                raise ConfigError(f"{where}: {error}") from error
        return {**values, VERSION: self.ref.version}


@dataclass(frozen=True)
class Plugins:
    """The plugins of an engine, in the order in which they were named."""

    loaded: tuple[Plugin, ...] = field(default=())

    def __iter__(self) -> Iterator[Plugin]:
        return iter(self.loaded)

    def of(self, kind: PluginKind) -> list[Plugin]:
        """Those of one kind."""
        return [plugin for plugin in self if plugin.kind is kind]

    @property
    def refs(self) -> PluginRefs:
        """How to name them so that no other version is loaded."""
        return PluginRefs(**{kind: tuple(plugin.ref for plugin in self.of(kind)) for kind in PluginKind})

    def resolved(self, params: SamplingParams, where: str = "sampling") -> SamplingParams:
        """The parameters with every plugin's own written out, and its version; as records hold them.

        Raises:
            ConfigError: a plugin is not among these or refuses what is asked of it, or has another version.
        """
        by_name = {plugin.name: plugin for plugin in self}
        chosen = {}
        for name, given in params.plugins:
            if name not in by_name:
                known = _known(name, by_name) if by_name else "there are none"
                raise ConfigError(
                    f"{where}.plugins.{name}: no such plugin, {known}; those of an engine are named when it is made, in"
                    " the section `plugins` of a config"
                )
            chosen[name] = by_name[name].settings(dict(given), f"{where}.plugins.{name}")
        return params.replace(plugins=chosen) if chosen else params


def load_plugins(refs: PluginRefs) -> Plugins:
    """Imports what is named. Modules are looked for where Python looks, and then in the current folder.

    Raises:
        ConfigError: something cannot be imported or found, is no class or function with parameters of the contract, or
            is of another version than it must be. The message names it and the cause.
    """
    return Plugins(tuple(_loaded(ref, kind, where) for where, kind, ref in refs))


def _loaded(ref: PluginRef, kind: PluginKind, where: str) -> Plugin:
    given = not isinstance(ref.use, str)
    target = ref.use if given else _found(ref.use, kind, where)
    label = f"{where} {ref.name}"
    defaults = _parameters(target, label, kind)
    # An object, or code that was carried, brings its version with it: package and source may be out of reach here.
    version = ref.version if (given or ref.carried) and ref.version else _version(target, label)
    if ref.version not in ("", version):
        raise ConfigError(
            f"{label}: expected version {ref.version}, here is {version}; install the version that is asked for. A run"
            " is continued, verified and explained with the plugins that it was drawn with"
        )
    return Plugin(kind, PluginRef(ref.use, ref.name, ref.before, version), target, defaults)


def _found(use: str, kind: PluginKind, where: str) -> Any:
    """What a text names."""
    reference = use
    if not REFERENCE.fullmatch(use):
        offered = importlib.metadata.entry_points(group=kind.group)
        values = {entry.value for entry in offered.select(name=use)}
        if len(values) != 1:
            names = sorted(set(offered.names))
            found = f"{len(values)} packages offer it" if values else f"installed are {', '.join(names) or 'none'}"
            raise ConfigError(
                f"{where}: {use}: expected the name of one entry point of the group {kind.group}, {found};"
                " install the package that offers it, or name it as package.module:name"
            )
        (reference,) = values
    return referenced(reference, f"{where}: {use}")


def _parameters(target: Any, label: str, kind: PluginKind) -> tuple[tuple[str, Any], ...]:
    array = "logits" if kind is PluginKind.TRANSFORM else "tokens"
    expected = f"{label}: expected a class whose objects are called with (state, {array}), or such a function"
    is_class = inspect.isclass(target)
    if not callable(target) or (is_class and not any("__call__" in vars(base) for base in target.__mro__)):
        raise ConfigError(f"{expected}, got {short(target)}")
    called = target.__call__ if is_class else target
    if inspect.iscoroutinefunction(called):
        raise ConfigError(f"{expected}, got one that is async")
    try:
        called_with, made_with = inspect.signature(called), inspect.signature(target)
        called_with.bind(*(None,) * (3 if is_class else 2))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{expected}: {error}") from error
    parameters = list(made_with.parameters.values())[0 if is_class else 2 :]
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{label}: expected parameters with names of their own, got {parameter}")
        if type(parameter.default) not in DTYPES:
            raise ConfigError(
                f"{label}: parameter {parameter.name}: expected a bool, an int or a float as its default, got"
                f" {'none' if parameter.default is parameter.empty else short(parameter.default)}"
            )
    if any(parameter.name == VERSION for parameter in parameters):
        raise ConfigError(f"{label}: no parameter can be called {VERSION}: records hold the plugin's version there")
    return tuple((parameter.name, parameter.default) for parameter in parameters)


def _version(target: Any, label: str) -> str:
    """What tells a plugin from what it was before: its own `version`, that of the installed package that holds its
    file, or a digest of the file."""
    if (own := getattr(target, VERSION, None)) is not None:
        if not isinstance(own, str) or not own:
            raise ConfigError(f"{label}: {VERSION}: expected text, got {short(own)}")
        return own
    try:
        source = inspect.getsourcefile(target)
        if source and Path(source).is_file():
            file = Path(source).resolve()
            if version := _installed_version(file, target.__module__):
                return version
            code = file.read_bytes()
        else:
            code = inspect.getsource(target).encode()
    except (OSError, TypeError) as error:
        raise ConfigError(f"{label}: its code cannot be read, so give it an attribute {VERSION}: a text") from error
    return f"sha256:{hashlib.sha256(code).hexdigest()[:12]}"


def _installed_version(file: Path, module: str) -> str | None:
    """That of the distribution that put a module's file where it is."""
    depth, package = module.count("."), module.partition(".")[0]
    root = (file.parent if file.name == "__init__.py" else file).parents[depth]
    for distribution in importlib.metadata.distributions(path=[str(root)]):
        record = f"\n{distribution.read_text('RECORD')}"
        if f"\n{package}/" in record or f"\n{package}.py," in record:
            return distribution.version
    return None


def _typed(value: Any, default: Any, where: str) -> Any:
    """A value as the type of the default."""
    kind = type(default)
    fits = {
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool) and -(2**31) <= value < 2**31,
        float: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
    }
    if not fits[kind]:
        words = {bool: "true or false", int: "a whole number", float: "a finite number"}
        raise ConfigError(f"{where}: expected {words[kind]}, as the default {default!r}, got {short(value)}")
    return kind(value)


def _known(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{f'did you mean {near[0]}? ' if near else ''}known are {', '.join(known) or 'none'}"
