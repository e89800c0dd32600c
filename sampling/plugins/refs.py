"""PluginRefs: which plugins an engine is made with, as a config or a caller names them. Nothing is loaded here."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Self

from sampling.errors import ConfigError
from sampling.orders import STAGES
from sampling.param_checks import short
from sampling.params import SamplingParams

LAST = "temperature"
"""The stage before which transforms stand that name no other."""

REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""`package.module:name`."""

_NAME = re.compile(r"[^\W\d][\w-]*")
_TAKEN = {*STAGES["reference"], *(field.name for field in dataclasses.fields(SamplingParams)), "model", "padded_ids"}


class PluginKind(enum.StrEnum):
    """What a plugin is."""

    TRANSFORM = "transforms"
    """It changes scores."""
    RULE = "stopping"
    """It ends rows."""

    @property
    def group(self) -> str:
        """The group of Python entry points by which installed packages offer such plugins."""
        return f"rollout.{self}"


@dataclass(frozen=True)
class PluginRef:
    """One plugin.

    Attributes:
        use: `package.module:name`, the name of an entry point, or the class or function itself.
        name: by which rows name it; "" takes the last part of `use`, in snake_case.
        before: stage of every order before which a transform stands; those of one stage stand as they are listed.
        version: that it must have; "" accepts any. Of a class or function itself: that it has.
        carried: its code was carried here from where it was loaded, and is of that version.
    """

    use: Any
    name: str = ""
    before: str = LAST
    version: str = ""
    carried: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            words = self.use if isinstance(self.use, str) else getattr(self.use, "__qualname__", "")
            last = re.split(r"[.:]", words)[-1]
            object.__setattr__(self, "name", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower())

    def located(self, kind: PluginKind) -> PluginRef:
        """The same with `package.module:name` in the place of an entry point's name, where one is found."""
        if not isinstance(self.use, str) or REFERENCE.fullmatch(self.use):
            return self
        values = [entry.value for entry in entry_points(group=kind.group, name=self.use)]
        return dataclasses.replace(self, use=values[0]) if values else self

    def top_module(self, kind: PluginKind) -> str:
        """The package or module in which it lies; "" where that is not known."""
        use = self.located(kind).use
        where = use if isinstance(use, str) else use.__module__
        return re.split(r"[.:]", where)[0] if ":" in where or not isinstance(use, str) else ""

    def check(self, where: str, kind: PluginKind) -> None:
        """Refuses what no plugin could be loaded from.

        Raises:
            ConfigError: a field cannot be used; the message begins with `where`.
        """
        if isinstance(self.use, str):
            if not (REFERENCE.fullmatch(self.use) or _NAME.fullmatch(self.use)):
                raise ConfigError(
                    f"{where}.use: expected package.module:name, or the name of an entry point of the group"
                    f" {kind.group}, got {short(self.use)}"
                )
        elif not callable(self.use):
            raise ConfigError(f"{where}.use: expected text, a class or a function, got {short(self.use)}")
        elif not hasattr(self.use, "__qualname__"):
            owner = type(self.use).__name__
            raise ConfigError(
                f"{where}.use: expected a class or a function, got an object of {owner}; give the class, and its"
                " parameters with each row"
            )
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(f"{where}.name: expected letters, digits, _ or -, got {short(self.name)}; give it a name")
        if self.name in _TAKEN:
            raise ConfigError(f"{where}.name: {self.name!r} is a stage or a parameter already; choose another name")
        if not isinstance(self.version, str):
            raise ConfigError(f"{where}.version: expected text, got {short(self.version)}")
        if kind is PluginKind.TRANSFORM and self.before not in STAGES["reference"]:
            raise ConfigError(
                f"{where}.before: expected a stage, one of {', '.join(STAGES['transformers'])}; got"
                f" {short(self.before)}"
            )
        if kind is PluginKind.RULE and self.before != LAST:
            raise ConfigError(f"{where}.before: a stopping rule has no place among the stages; leave it out")


@dataclass(frozen=True)
class PluginRefs:
    """All plugins of an engine. Travels between processes; a class or function in it is pickled as Ray does.

    Raises:
        ConfigError: two have one name, or one cannot be loaded whatever is installed.
    """

    transforms: tuple[PluginRef, ...] = ()
    stopping: tuple[PluginRef, ...] = ()

    def __post_init__(self) -> None:
        names: dict[str, str] = {}
        for where, kind, ref in self:
            ref.check(where, kind)
            if ref.name in names:
                raise ConfigError(f"{where}.name: {ref.name!r} is that of {names[ref.name]} already; name one of them")
            names[ref.name] = where

    def __iter__(self) -> Iterator[tuple[str, PluginKind, PluginRef]]:
        """Each with its place, for messages, and its kind."""
        for kind in PluginKind:
            for i, ref in enumerate(getattr(self, kind)):
                yield f"plugins.{kind}[{i}]", kind, ref

    def top_modules(self) -> tuple[str, ...]:
        """The packages or modules in which the plugins lie, each once."""
        return tuple(dict.fromkeys(name for _, kind, ref in self if (name := ref.top_module(kind))))

    def carried(self, modules: Collection[str]) -> PluginRefs:
        """As they are loaded where the code of some top modules was carried, and nothing else that was installed."""
        refs: dict[str, list[PluginRef]] = {kind: [] for kind in PluginKind}
        for _, kind, ref in self:
            there = ref.top_module(kind) in modules
            refs[kind].append(dataclasses.replace(ref.located(kind), carried=True) if there else ref)
        return PluginRefs(**{kind: tuple(some) for kind, some in refs.items()})

    @classmethod
    def of(cls, values: Any) -> Self:
        """Reads what a config or a caller gives: a mapping with `transforms` and `stopping`, each a list of what to
        use, or of mappings with the fields of PluginRef.

        Raises:
            ConfigError: a key or a value is of another kind.
        """
        if isinstance(values, cls):
            return values
        kinds = [str(kind) for kind in PluginKind]
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(f"plugins: expected {' and '.join(kinds)}, each with a list, got {short(values)}")
        for kind, items in (values or {}).items():
            if kind not in kinds:
                raise ConfigError(f"plugins.{kind}: no such key; known are {', '.join(kinds)}")
            if not isinstance(items, list | tuple):
                raise ConfigError(f"plugins.{kind}: expected a list, got {short(items)}")
        return cls(
            **{
                kind: tuple(_read(item, f"plugins.{kind}[{i}]") for i, item in enumerate(items))
                for kind, items in (values or {}).items()
            }
        )

    def to_dict(self) -> dict[str, list[dict[str, Any]]]:
        """As plain values, which `of` reads back; those given as objects stay objects."""
        return {
            str(kind): [{name: getattr(ref, name) for name in _KEYS[kind]} for ref in getattr(self, kind)]
            for kind in PluginKind
        }


_KEYS = {PluginKind.TRANSFORM: ("use", "name", "before", "version"), PluginKind.RULE: ("use", "name", "version")}
"""What a config says of a plugin."""


def _read(item: Any, where: str) -> PluginRef:
    if isinstance(item, PluginRef):
        return item
    if not isinstance(item, Mapping):
        return PluginRef(item)
    known = _KEYS[PluginKind.TRANSFORM]
    for key in item:
        if key not in known:
            raise ConfigError(f"{where}.{key}: no such key; known are {', '.join(known)}")
    if "use" not in item:
        raise ConfigError(f"{where}.use: missing; expected package.module:name, or the name of an entry point")
    return PluginRef(**item)
