"""config.json, old and new, read or refused by name."""

from __future__ import annotations

import pytest
import transformers

from sampling.errors import CheckpointError
from sampling.models import ModelConfig, RopeScaling

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _as(family: str, **settings) -> dict:
    names = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM"}
    return {**LLAMA, "architectures": [names[family]], "model_type": family, **settings}


def test_plain_llama():
    config = ModelConfig.from_hf(LLAMA)
    assert (config.family, config.width, config.layers) == ("llama", 48, 3)
    assert (config.heads, config.kv_heads, config.q_per_kv, config.head_dim) == (6, 2, 3, 8)
    assert (config.tied_head, config.qkv_bias, config.o_bias, config.mlp_bias) == (False,) * 4
    assert config.sliding_windows == (None, None, None)
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)


def test_a_llama_without_grouped_heads_leaves_the_setting_out():
    old = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert ModelConfig.from_hf(old).kv_heads == 6


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_ROPE}},
    ],
    ids=["transformers-4", "older", "transformers-5"],
)
def test_rope_settings_wherever_they_stand(settings):
    config = ModelConfig.from_hf(LLAMA | settings)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


def test_what_transformers_writes_today_is_read():
    written = transformers.MistralConfig(
        sliding_window=9, num_hidden_layers=2, rope_parameters={"rope_type": "default", "rope_theta": 7.0}
    )
    config = ModelConfig.from_hf(written.to_dict() | {"architectures": ["MistralForCausalLM"]})
    assert (config.rope_theta, config.sliding_windows) == (7.0, (9, 9))


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        (_as("mistral", sliding_window=4), (4, 4, 4)),
        (_as("mistral", sliding_window=None), (None, None, None)),
        (_as("qwen2", sliding_window=4, use_sliding_window=False, max_window_layers=0), (None,) * 3),
        (_as("qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=1), (None, 4, 4)),
        (
            _as(
                "qwen3",
                sliding_window=4,
                use_sliding_window=True,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
            (4, None, 4),
        ),
    ],
)
def test_sliding_windows_per_layer(settings, windows):
    assert ModelConfig.from_hf(settings).sliding_windows == windows


def test_biases():
    qwen2 = ModelConfig.from_hf(_as("qwen2"))
    assert (qwen2.qkv_bias, qwen2.o_bias) == (True, False)
    llama = ModelConfig.from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


def test_qwen3_has_its_own_head_dim_and_norms():
    config = ModelConfig.from_hf(_as("qwen3"))
    assert (config.head_dim, config.qk_norm, config.qkv_bias) == (128, True, False)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*supported are LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "layer types"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 4}, "6 heads.*4 key/value heads"),
        ({"head_dim": 7}, "even"),
        (_as("qwen2", layer_types=["linear_attention"] * 3), "linear_attention"),
        (_as("qwen2", num_key_value_heads=None), "num_key_value_heads"),
        (_as("mistral", sliding_window=0), "sliding_window: expected a whole number in 1"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(settings, named):
    with pytest.raises(CheckpointError, match=named):
        ModelConfig.from_hf(LLAMA | settings)
