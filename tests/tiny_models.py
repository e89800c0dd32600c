"""Tiny random checkpoints, saved by Transformers itself: complete folders with weights, tokenizer and chat template.

    path = tiny_llama(tmp_path / "llama")
    checkpoint = load_checkpoint(path)

Sizes are small and mostly distinct, so that a swapped axis shows. Weights are large enough for logits to be far from
flat, and two seeds give two different models. The embedding has more rows than the tokenizer has tokens, as real
checkpoints do; vocab_size may be changed, down to TOKENIZER_LEN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
"""Ids 0 .. 3."""

EOS_ID = 2
PAD_ID = 3

MERGES = (("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("in", "g"), ("Ċ", "Ċ"))
"""So that a few tokens are longer than a byte; Ġ is a space and Ċ a newline."""

TOKENIZER_LEN = len(SPECIAL_TOKENS) + 256 + len(MERGES)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_llama(directory: Path, **settings: Any) -> Path:
    """Grouped heads (4 over 2), untied head, an explicit head_dim that is not width / heads; see _save."""
    base = {"num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": False}
    return _save(transformers.LlamaConfig, transformers.LlamaForCausalLM, directory, base | settings)


def tiny_qwen2(directory: Path, **settings: Any) -> Path:
    """Biased query, key and value projections, tied head; see _save."""
    base = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    return _save(transformers.Qwen2Config, transformers.Qwen2ForCausalLM, directory, base | settings)


def tiny_qwen3(directory: Path, **settings: Any) -> Path:
    """Normed queries and keys, one key/value head for all four; see _save."""
    base = {"num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": True}
    return _save(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, directory, base | settings)


def tiny_mistral(directory: Path, **settings: Any) -> Path:
    """A sliding window of 5 keys; see _save."""
    base = {"num_key_value_heads": 2, "head_dim": 6, "sliding_window": 5}
    return _save(transformers.MistralConfig, transformers.MistralForCausalLM, directory, base | settings)


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer with TOKENIZER_LEN tokens and a chat template; encodes any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in MERGES)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[PAD_ID],
        additional_special_tokens=list(SPECIAL_TOKENS[:2]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _save(config_class: Any, model_class: Any, directory: Path, settings: dict[str, Any]) -> Path:
    """Makes a random model and saves it with its tokenizer.

    Args:
        directory: where to; made if missing.
        settings: of the Transformers config; besides those, `seed` picks the weights, `max_shard_size` makes
            Transformers split the file, and `dtype` is that of the saved weights.
    """
    settings = dict(settings)
    seed = settings.pop("seed", 0)
    max_shard_size = settings.pop("max_shard_size", "1GB")
    dtype = settings.pop("dtype", torch.float32)
    base = {
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**(base | settings)))
        with torch.no_grad():
            # Larger weights inside would sharpen the attention until float32 rounding alone moves logits by 3e-5; a
            # larger embedding and head spread the logits (standard deviation about 2) without that.
            model.get_input_embeddings().weight.mul_(2)
            if not model.config.tie_word_embeddings:
                model.get_output_embeddings().weight.mul_(2)
            # Transformers starts norms at one and biases at zero, where a missing one would not show.
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(directory)
    return Path(directory)
