"""Tiny GGUF files, written with the gguf package the way llama.cpp's converter writes them.

    path, reference = tiny_gguf(tmp_path, GGMLQuantizationType.Q8_0)

The converter is written afresh here, from llama.cpp's: it turns a Transformers model into a file, so that the loader
under test is held to something other than its own inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType

from tests.tiny_models import CHAT_TEMPLATE, TOKENIZER_LEN, byte_tokenizer, tiny_llama, tiny_qwen2, tiny_qwen3

# Every row of a quantised matrix must hold whole blocks of 32 numbers.
_BLOCKED = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
_MAKERS = {"llama": tiny_llama, "qwen2": tiny_qwen2, "qwen3": tiny_qwen3}

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_gguf(
    directory: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    family: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    **settings: Any,
) -> tuple[Path, torch.nn.Module]:
    """Writes a random model to `directory`/tiny.gguf, matrices stored as `kind`, norms and biases as float32.

    Args:
        metadata: string, integer or float keys to add to the header, or to replace there.
        extra: tensors to add.
        settings: of the Transformers config, as for tiny_llama.
    Returns:
        The file, and Transformers' model with the weights that the file's stand for after dequantisation.
    """
    source = _MAKERS[family](directory / "source", **(_BLOCKED | settings))
    model = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager", dtype=torch.float32)
    config = model.config
    path = directory / "tiny.gguf"
    writer = gguf.GGUFWriter(path, family)
    _write_config(writer, config)
    _write_tokenizer(writer, config.vocab_size)
    for key, value in (metadata or {}).items():
        _write_value(writer, key, value)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            array = tensor.numpy()
            stored_kind = kind if array.ndim == 2 else GGMLQuantizationType.F32
            tensor.copy_(torch.from_numpy(_rounded(array, stored_kind)))
            stored = gguf.quantize(_interleaved(name, array, config) if family == "llama" else array, stored_kind)
            writer.add_tensor(_gguf_name(name), stored, raw_dtype=stored_kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model.eval()


def _rounded(array: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    return np.array(gguf.dequantize(gguf.quantize(array, kind), kind), np.float32).reshape(array.shape)


def _interleaved(name: str, array: np.ndarray, config: Any) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`: a head's first and second half alternate, row by row."""
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for ending, count in heads.items():
        if name.endswith(ending):
            half = array.shape[0] // count // 2
            return array.reshape(count, 2, half, -1).swapaxes(1, 2).reshape(array.shape).copy()
    return array.copy()


def _gguf_name(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _write_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """byte_tokenizer, its vocabulary padded as llama.cpp pads it."""
    vocab = byte_tokenizer().get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    padding = [f"[PAD{index}]" for index in range(TOKENIZER_LEN, vocab_size)]
    kinds = [gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (TOKENIZER_LEN - 4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens + padding)
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * len(padding))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he", "i n", "in g", "Ċ Ċ"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(0)
    writer.add_pad_token_id(3)
    writer.add_chat_template(CHAT_TEMPLATE)


def _write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    writer.kv_data[0].pop(key, None)
    add[type(value)](key, value)
