"""The tokenizer inside a GGUF file, rebuilt with the tokenizers library.

Transformers can do this too, but only where torch is installed, and it splits numbers as GPT-2 does even for
vocabularies that were learned from single digits.
"""

from __future__ import annotations

from typing import Any

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
from transformers import PreTrainedTokenizerFast

from sampling.checkpoints.gguf_file import GGUFFile
from sampling.errors import CheckpointError

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


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """Rebuilds a byte-level BPE tokenizer with its special tokens and chat template.

    Raises:
        CheckpointError: the file has no tokenizer, or one of another kind.
    """

    def setting(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"tokenizer.ggml.{key}", default)

    tokens, merges = file.tokens, setting("merges")
    pre = setting("pre", "default")
    if setting("model") != "gpt2" or not tokens or merges is None:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model = {setting('model')!r} is not supported;"
            " expected 'gpt2' (byte-level BPE) with tokens and merges"
        )
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre = {pre!r} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3's vocabulary holds whole words that its merges cannot reach.
    backend = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    for token, kind in zip(tokens, setting("token_type", []), strict=False):
        # Both are matched whole wherever they stand in a text; only control tokens can be skipped when decoding.
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            special = kind == TokenType.CONTROL
            backend.add_tokens([AddedToken(token, normalized=False, special=special)])
    bos = setting("bos_token_id")
    if setting("add_bos_token", pre == "llama-bpe") and bos is not None:
        backend.post_processor = processors.TemplateProcessing(  # pyright: ignore
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    named = {"bos": bos, "eos": setting("eos_token_id")}
    named |= {"unk": setting("unknown_token_id"), "pad": setting("padding_token_id")}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": tokens[index] for name, index in named.items() if index is not None},
    )
