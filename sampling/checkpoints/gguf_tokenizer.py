"""The tokenizer inside a GGUF file, rebuilt with the tokenizers library.

Transformers can do this too, but only where torch is installed, and it splits numbers as GPT-2 does even for
vocabularies that were learned from single digits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gguf import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from sampling.checkpoints.gguf_file import GGUFFile
from sampling.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _gpt2()]),
    "llama-bpe": lambda: _split(_CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST),
    "qwen2": lambda: _split(_CONTRACTIONS + _WORDS + r"|\p{N}" + _REST),
}
"""How text is cut before the merges apply, by tokenizer.ggml.pre."""


_SPECIAL_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Names of special tokens in Transformers, and in the keys of a GGUF file."""


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """A Transformers tokenizer around `gguf_backend`, with the file's special tokens and chat template.

    Raises:
        CheckpointError: as `gguf_backend`.
    """
    from transformers import PreTrainedTokenizerFast

    backend = gguf_backend(file)
    ids = {f"{role}_token": _special(file, name) for role, name in _SPECIAL_ROLES.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{role: file.tokens[index] for role, index in ids.items() if index is not None},
    )


def gguf_backend(file: GGUFFile) -> Tokenizer:
    """Rebuilds a byte-level BPE tokenizer with its special tokens.

    Raises:
        CheckpointError: the file has no tokenizer, or one of another kind.
    """
    tokens, merges = file.tokens, _setting(file, "merges")
    pre = _setting(file, "pre", "default")
    if _setting(file, "model") != "gpt2" or not tokens or merges is None:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model = {_setting(file, 'model')!r} is not supported;"
            " expected 'gpt2' (byte-level BPE) with tokens and merges"
        )
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre = {pre!r} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3's vocabulary holds whole words that its merges cannot reach.
    try:
        backend = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{file.path}: the tokenizer cannot be read: {error}") from error
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    for token, kind in zip(tokens, _setting(file, "token_type", []), strict=False):
        # Both are matched whole wherever they stand in a text; only control tokens can be skipped when decoding.
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            special = kind == TokenType.CONTROL
            backend.add_tokens([AddedToken(token, normalized=False, special=special)])
    bos = _special(file, "bos")
    if _setting(file, "add_bos_token", pre == "llama-bpe") and bos is not None:
        backend.post_processor = processors.TemplateProcessing(  # pyright: ignore
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return backend


def _special(file: GGUFFile, name: str) -> int | None:
    """Id of a special token, if the file names one."""
    index = _setting(file, f"{name}_token_id")
    if index is not None and not (isinstance(index, int) and 0 <= index < len(file.tokens)):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.{name}_token_id: expected the id of a token, in 0 .. {len(file.tokens) - 1},"
            f" got {index!r}"
        )
    return index


def _setting(file: GGUFFile, key: str, default: Any = None) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{key}", default)
