"""One tiny checkpoint per kind of model, each next to Transformers' own forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from sampling.checkpoints import load_checkpoint
from sampling.models import Transformer
from tests.tiny_models import tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}

KINDS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_llama,
    "llama_tied": lambda path: tiny_llama(path, tie_word_embeddings=True, head_dim=None),
    "llama_llama3_rope": lambda path: tiny_llama(path, rope_parameters=LLAMA3_ROPE),
    "llama_linear_rope": lambda path: tiny_llama(path, rope_parameters=LINEAR_ROPE),
    "llama_biased": lambda path: tiny_llama(path, attention_bias=True, mlp_bias=True),
    "llama_sharded": lambda path: tiny_llama(path, max_shard_size="20KB"),
    "qwen2": tiny_qwen2,
    "qwen2_windowed": lambda path: tiny_qwen2(path, **WINDOWED),
    "qwen3": tiny_qwen3,
    "qwen3_windowed_biased": lambda path: tiny_qwen3(path, attention_bias=True, **WINDOWED),
    "mistral": tiny_mistral,
    "mistral_unwindowed": lambda path: tiny_mistral(path, sliding_window=None),
}


@dataclass(frozen=True)
class Loaded:
    """A tiny checkpoint in both worlds."""

    model: Transformer
    params: dict
    reference: torch.nn.Module

    def reference_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Transformers' logits of one unpadded row: tokens [length] to float32 [length, vocab]."""
        with torch.no_grad():
            return self.reference(torch.tensor(tokens, dtype=torch.int64)[None]).logits[0].numpy()


@pytest.fixture(scope="session")
def load_kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Makes and loads the checkpoint of one kind; once per session."""
    made: dict[str, Loaded] = {}

    def load(kind: str) -> Loaded:
        if kind not in made:
            path = KINDS[kind](tmp_path_factory.mktemp(kind))
            checkpoint = load_checkpoint(path)
            # Eager attention is the plainest of Transformers' implementations, and honours sliding windows.
            reference = transformers.AutoModelForCausalLM.from_pretrained(
                path, attn_implementation="eager", dtype=torch.float32
            )
            made[kind] = Loaded(Transformer(checkpoint.info.config), checkpoint.params, reference.eval())
        return made[kind]

    return load


@pytest.fixture(params=list(KINDS))
def loaded(request: pytest.FixtureRequest, load_kind: Callable[[str], Loaded]) -> Loaded:
    """Each kind in turn."""
    return load_kind(request.param)
