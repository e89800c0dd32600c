"""Reads a config from YAML or TOML with `--set` overrides, and turns every problem into one readable error."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import pydantic
import yaml

from rollout.config import RunConfig, unknown_key
from rollout.json_values import shown
from sampling.errors import ConfigError

_Config = TypeVar("_Config", bound=pydantic.BaseModel)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks a config file.

    Args:
        path: a .yaml, .yml or .toml file.
        overrides: `section.key=value` items, applied in order; the value is read as YAML. A number in the path
            picks an item of a list (`prompts.tasks.0.size=16`).
    Raises:
        ConfigError: the file cannot be read, or values are unknown, missing or out of range. Every problem is listed.
    """
    return parse_config(read_values(path, overrides), origin=str(path), overridden=overridden_keys(overrides))


def read_values(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tree of plain values in a config file, unchecked, with the overrides in place; None stands for no file.

    Raises:
        ConfigError: the file cannot be read, or an override has no place.
    """
    values = {} if path is None else _read(Path(path))
    for override in overrides:
        _apply(values, override)
    return values


def overridden_keys(overrides: Sequence[str]) -> list[str]:
    """The dotted keys that overrides give."""
    return [override.partition("=")[0].strip() for override in overrides]


def parse_config(values: Mapping[str, Any], origin: str = "config", overridden: Sequence[str] = ()) -> RunConfig:
    """Checks a tree of plain values.

    Args:
        origin: where the values came from, named with each problem.
        overridden: dotted keys that `--set` gave.
    Raises:
        ConfigError: as `load_config`.
    """
    return validated(RunConfig, values, origin, overridden)


def validated(kind: type[_Config], values: Mapping[str, Any], origin: str, overridden: Sequence[str] = ()) -> _Config:
    """Plain values as a config of the given kind; arguments and errors as `parse_config`."""
    try:
        return kind.model_validate(dict(values))
    except pydantic.ValidationError as error:
        problems = []
        for fault in error.errors():
            for text in _describe(fault, kind).split("\n"):
                key = text.partition(":")[0]
                given = any(key == o or key.startswith(o + ".") or o.startswith(key + ".") for o in overridden)
                problems.append(f"{text}  ({'--set' if given else origin})")
        raise ConfigError("\n".join(problems)) from error


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML."""
    return yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)


def _read(path: Path) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise ConfigError(f"{path}: expected a .yaml, .yml or .toml file, got suffix {path.suffix!r}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8, got {error.reason} at byte {error.start}") from error
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, _StrictLoader)
    except _UNREADABLE as error:
        raise ConfigError(f"{path}: {_flat(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected sections with keys and values, got {shown(values)}")
    return values


_UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)
"""What the readers raise: TOML's errors are ValueErrors, as are impossible dates and numbers of 5000 digits."""


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads 1e-3 as the number it is."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise yaml.YAMLError(f"line {line}: expected text as a key, got {shown(key)}")
            if key in lines and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.YAMLError(f"line {line}: key {key!r} is given twice, first on line {lines[key]}; keep one")
            lines[key] = line
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _apply(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {override}: expected section.key=value, such as sampling.temperature=0.7")
    try:
        value = yaml.load(text, _StrictLoader)
    except _UNREADABLE as error:
        raise ConfigError(
            f"--set {override}: expected a YAML value, got {text!r} ({_flat(error)});"
            " put quotes around text with special characters"
        ) from error
    parent: Any = values
    for depth, name in enumerate(names):
        place = ".".join(names[:depth])
        key: Any = name
        if isinstance(parent, list):
            if not name.isdecimal() or int(name) >= len(parent):
                raise ConfigError(f"--set {override}: expected an item 0 .. {len(parent) - 1} of {place}, got {name}")
            key = int(name)
        elif not isinstance(parent, dict):
            raise ConfigError(f"--set {override}: {place} is a single value and has no keys")
        if depth == len(names) - 1:
            parent[key] = value
        else:
            parent = parent[key] if isinstance(parent, list) else parent.setdefault(key, {})


def _describe(fault: Any, root: type[pydantic.BaseModel]) -> str:
    """One problem as `section.key: expected ..., got ...`; texts of our own errors say that themselves."""
    names = [str(name) for name in fault["loc"]]
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return _in_full(str(cause), names)
    model, names = _model_at(names, root)
    place = ".".join(names)
    if fault["type"] == "extra_forbidden":
        return unknown_key(".".join(names[:-1]), names[-1], list(model.model_fields))
    if fault["type"] == "missing":
        return f"{place}: expected a value, got none; add it to the file or give --set {place}=..."
    if fault["type"] == "union_tag_not_found":
        return f"{place}: expected a key 'source', one of {', '.join(_SOURCES)}, got {shown(fault['input'])}"
    if fault["type"] == "union_tag_invalid":
        return f"{place}.source: expected one of {', '.join(_SOURCES)}, got {fault['ctx']['tag']!r}"
    plain = _EXPECTED.get(fault["type"])
    expected = plain.format(**fault.get("ctx", {})) if plain else fault["msg"].removeprefix("Input should be ")
    return f"{place}: expected {expected}, got {shown(fault['input'])}"


def _in_full(text: str, names: list[str]) -> str:
    """Lines that begin with their section, with the sections around it in front: `scorers.1.sampling.top_p: ...`."""
    if len(names) < 2:
        return text
    around, section = ".".join(names[:-1]), names[-1]
    return "\n".join(
        f"{around}.{line}" if line.startswith((f"{section}.", f"{section}:")) else line for line in text.split("\n")
    )


_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt}",
    "tuple_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
    "invalid_key": "text as keys",
    "string_too_short": "text that is not empty",
}
"""Pydantic's kinds of fault in words that name no framework."""


def _sources() -> dict[str, type[pydantic.BaseModel]]:
    members = get_args(RunConfig.model_fields["prompts"].annotation)
    return {get_args(member.model_fields["source"].annotation)[0]: member for member in members}


_SOURCES = _sources()


def _model_at(names: list[str], root: type[pydantic.BaseModel]) -> tuple[type[pydantic.BaseModel], list[str]]:
    """The model that holds the last of the names, and the names without the union's tag."""
    model: Any = root
    kept: list[str] = []
    for depth, name in enumerate(names):
        if depth == 1 and names[0] == "prompts" and name in _SOURCES:
            model = _SOURCES[name]
            continue
        kept.append(name)
        if depth == len(names) - 1 or name.isdecimal():
            continue
        inner = _models_in(model.model_fields[name].annotation) if name in model.model_fields else []
        model = inner[0] if len(inner) == 1 else model
    return model, kept


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _flat(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()
