"""Small tokenizers of every kind whose tokens spell text in their own way, besides the byte-level one of tiny_models.

The fast ones are built with the tokenizers library, the slow ones derive from Transformers' Python tokenizer.
"""

from __future__ import annotations

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

WORDS = ("stop", "the", "end", "fool", "a", "b", "c", "d", "e", "f")


def byte_fallback_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Llama's kind: SentencePiece BPE, U+2581 for a space, <0xNN> for a byte that no token covers."""
    merges = [("▁", "s"), ("t", "o"), ("▁s", "to"), ("▁sto", "p"), ("E", "N"), ("EN", "D"), ("▁", "▁")]
    tokens = ["<unk>", "<s>", "</s>", *_byte_names(), "▁", *"abcdefopstEND.!é"]
    vocab = {token: i for i, token in enumerate([*tokens, *(left + right for left, right in merges)])}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _fast(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def wordpiece_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """BERT's kind: a word, or '##' and the rest of one; its decoder tidies the space before punctuation."""
    tokens = ["[UNK]", "[CLS]", "[SEP]", *WORDS, *(f"##{word}" for word in WORDS), "ß", ".", ",", "'"]
    backend = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _fast(backend, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


def unigram_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """T5's kind: SentencePiece Unigram without byte pieces."""
    tokens = ["<unk>", "</s>", *(f"▁{word}" for word in WORDS), *WORDS, "▁", "é", "."]
    backend = Tokenizer(models.Unigram([(token, -float(i)) for i, token in enumerate(tokens)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _fast(backend, unk_token="<unk>", eos_token="</s>")


def word_level_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Whole words without a decoder, so with a space between any two; it does not know the letters abcdef."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "stop": 1, "the": 2, "é": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return _fast(backend, unk_token="[UNK]")


class _SlowTokenizer(transformers.PreTrainedTokenizer):
    """One token per character, in Python."""

    def __init__(self, tokens: list[str]) -> None:
        self._ids = {token: i for i, token in enumerate(tokens)}
        super().__init__(unk_token=tokens[0])

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        return self._ids | self.added_tokens_encoder

    def _tokenize(self, text: str, **_) -> list[str]:
        return [*text]

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return [*self._ids][index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("▁", " ").strip()


class SlowTextTokenizer(_SlowTokenizer):
    """Characters and a few words."""

    def __init__(self) -> None:
        super().__init__(["<unk>", *"abcdef", "▁stop", "é", "."])


class SlowByteFallbackTokenizer(_SlowTokenizer):
    """SentencePiece with byte pieces."""

    def __init__(self) -> None:
        super().__init__(["<unk>", *_byte_names(), *"abcdef", "▁stop", "▁", "é"])


class SlowByteLevelTokenizer(_SlowTokenizer):
    """GPT-2's tokenizer as it was in Python, with its byte tables."""

    def __init__(self) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self.byte_encoder = bytes_to_unicode()
        self.byte_decoder = {char: byte for byte, char in self.byte_encoder.items()}
        super().__init__(["<unk>", *self.byte_decoder, "Ġstop"])

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return bytes(self.byte_decoder[char] for char in "".join(tokens)).decode(errors="replace")


class Processor:
    """What a multimodal model has in place of a tokenizer."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer


def _byte_names() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _fast(backend: Tokenizer, **special: str) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
