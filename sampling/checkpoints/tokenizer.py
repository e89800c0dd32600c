"""A checkpoint's own tokenizer: whole, with its chat template, or only its backend; without network or torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sampling.checkpoints.gguf_file import GGUFFile
from sampling.checkpoints.inspection import CheckpointFormat, CheckpointInfo
from sampling.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(info: CheckpointInfo) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: the checkpoint has no tokenizer, or none that can be read.
    """
    # Transformers takes seconds and hundreds of megabytes to import; whoever only samples tokens is spared.
    with _without_advice():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from sampling.checkpoints.gguf_tokenizer import gguf_tokenizer

    if info.format is CheckpointFormat.GGUF:
        return gguf_tokenizer(GGUFFile(info.path))
    _require_tokenizer_json(info)
    try:
        tokenizer = AutoTokenizer.from_pretrained(info.path, local_files_only=True)
    except Exception as error:  # foreign code and foreign files: whatever it trips over
        raise CheckpointError(f"{info.path}: the tokenizer cannot be read: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise CheckpointError(f"{info.path}: expected a fast tokenizer, got {type(tokenizer).__name__}")
    return tokenizer


def load_backend(info: CheckpointInfo) -> Tokenizer:
    """The backend of a checkpoint's tokenizer: text to ids and the vocabulary, in a fraction of the time and memory.

    Raises:
        CheckpointError: the checkpoint has no tokenizer, or none that can be read.
    """
    from tokenizers import Tokenizer

    from sampling.checkpoints.gguf_tokenizer import gguf_backend

    if info.format is CheckpointFormat.GGUF:
        return gguf_backend(GGUFFile(info.path))
    path = _require_tokenizer_json(info)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{info.path}: the tokenizer cannot be read: {error}") from error


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Within it Transformers does not advise to install PyTorch, which nothing here needs; its warnings are shown."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _require_tokenizer_json(info: CheckpointInfo) -> Path:
    path = info.path / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{info.path}: expected a tokenizer.json, found none; "
            "save one there with tokenizer.save_pretrained(...) or convert it with Transformers"
        )
    return path
