"""load_tokenizer: a checkpoint's own tokenizer, with its chat template, and no network or torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sampling.checkpoints.gguf_file import GGUFFile
from sampling.checkpoints.inspection import CheckpointFormat, CheckpointInfo
from sampling.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(info: CheckpointInfo) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: the checkpoint has no tokenizer, or none that can be read.
    """
    # Transformers takes seconds and hundreds of megabytes to import; whoever only samples tokens is spared.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from sampling.checkpoints.gguf_tokenizer import gguf_tokenizer

    if info.format is CheckpointFormat.GGUF:
        return gguf_tokenizer(GGUFFile(info.path))
    if not (info.path / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{info.path}: expected a tokenizer.json, found none; "
            "save one there with tokenizer.save_pretrained(...) or convert it with Transformers"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(info.path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{info.path}: the tokenizer cannot be read: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise CheckpointError(f"{info.path}: expected a fast tokenizer, got {type(tokenizer).__name__}")
    return tokenizer
