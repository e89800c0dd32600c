"""The forward against Transformers, and against itself in pieces.

1. Logits equal Transformers' at every position, however a batch of prompts of unequal lengths is padded.
2. Prefill in chunks and decode one by one through the cache equal one forward of the whole sequence.
3. Padding is invisible: neither what it holds nor where it lies changes another token.
4. Gradients equal torch's, and padding has none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from sampling.models import KVCache, Transformer

TOLERANCE = 2e-5
LENGTHS = (11, 3, 7)
VOCAB = 266


def _prompts(seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, length, dtype=np.int32) for length in LENGTHS]


def _batch(prompts: list[np.ndarray], side: str, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and positions [rows, width], padded with an arbitrary token on one side."""
    tokens = np.full((len(prompts), width), 77, np.int32)
    positions = np.full((len(prompts), width), -1, np.int32)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt) if side == "left" else 0
        tokens[row, start : start + len(prompt)] = prompt
        positions[row, start : start + len(prompt)] = np.arange(len(prompt))
    return tokens, positions


def _logits(loaded, tokens, positions) -> np.ndarray:
    hidden, cache = loaded.model.apply({"params": loaded.params}, tokens, positions)
    assert cache is None
    return np.asarray(loaded.model.apply({"params": loaded.params}, hidden, method="logits"))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_equal_transformers(loaded, side):
    prompts = _prompts()
    tokens, positions = _batch(prompts, side, 13)
    logits = _logits(loaded, tokens, positions)
    assert logits.dtype == np.float32
    for row, prompt in enumerate(prompts):
        expected = loaded.reference_logits(prompt)
        assert expected.std() > 0.5, "a flat reference would prove nothing"
        np.testing.assert_allclose(logits[row][positions[row] >= 0], expected, rtol=0, atol=TOLERANCE)


def test_unpadded_prompt_equals_transformers(loaded):
    prompt = _prompts(seed=1)[0]
    logits = _logits(loaded, prompt[None], np.arange(len(prompt), dtype=np.int32)[None])
    np.testing.assert_allclose(logits[0], loaded.reference_logits(prompt), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("chunk", "block_len"), [(4, None), (5, 3)])
def test_chunked_prefill_then_decode_equals_one_forward(loaded, chunk, block_len):
    """The last chunk of a prompt is padded; a row that is done, or not yet there, is padding altogether."""
    rows, whole, cache_len = len(LENGTHS), 16, 16
    random = np.random.default_rng(3)
    tokens = random.integers(0, VOCAB, (rows, whole), dtype=np.int32)
    everywhere = np.broadcast_to(np.arange(whole, dtype=np.int32), (rows, whole))
    expected = _logits(loaded, tokens, everywhere)

    step = jax.jit(loaded.model.apply)
    cache = KVCache.empty(loaded.model.config, rows, cache_len, block_len=block_len)
    seen = np.full((rows, whole), False)
    got = np.zeros_like(expected)
    starts = [(start, chunk, LENGTHS) for start in range(0, max(LENGTHS), chunk)]
    starts += [(start, 1, (whole,) * rows) for start in range(min(LENGTHS), whole)]
    for start, size, ends in starts:
        positions = np.arange(start, start + size, dtype=np.int32)[None].repeat(rows, 0)
        fresh = (positions < np.array(ends)[:, None]) & ~seen[:, np.minimum(positions[0], whole - 1)]
        positions = np.where(fresh, positions, -1)
        fed = np.where(fresh, tokens[:, np.minimum(np.arange(start, start + size), whole - 1)], 99)
        hidden, cache = step({"params": loaded.params}, fed, positions, cache)
        logits = loaded.model.apply({"params": loaded.params}, hidden, method="logits")
        for row, column in zip(*np.nonzero(fresh), strict=True):
            got[row, positions[row, column]] = logits[row, column]
            seen[row, positions[row, column]] = True
    assert seen.all()
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def test_hidden_state_of_the_last_prompt_token_gives_the_next_token(load_kind):
    """Case B053: each row's first token comes from its own last position, wherever that lies in the batch."""
    loaded = load_kind("llama")
    prompts = _prompts(seed=4)
    tokens, positions = _batch(prompts, "right", 16)
    hidden, _ = loaded.model.apply({"params": loaded.params}, tokens, positions)
    last = positions.argmax(axis=1)
    np.testing.assert_array_equal(last, [len(prompt) - 1 for prompt in prompts])
    rows = hidden[np.arange(len(prompts)), last]
    first = loaded.model.apply({"params": loaded.params}, rows, method="logits").argmax(-1)
    alone = [loaded.reference_logits(prompt)[-1].argmax() for prompt in prompts]
    np.testing.assert_array_equal(first, alone)


def test_padding_content_is_invisible(load_kind):
    loaded = load_kind("llama")
    tokens, positions = _batch(_prompts(), "left", 13)
    other = np.where(positions < 0, 5, tokens)
    kept = positions >= 0
    np.testing.assert_array_equal(_logits(loaded, tokens, positions)[kept], _logits(loaded, other, positions)[kept])


def test_gradients_equal_torch(load_kind):
    loaded = load_kind("qwen2")
    prompts = _prompts()
    tokens, positions = _batch(prompts, "left", 13)

    def loss(params):
        hidden, _ = loaded.model.apply({"params": params}, tokens, positions)
        logits = loaded.model.apply({"params": params}, hidden, method="logits")
        scores = jax.nn.log_softmax(logits)[:, :, 5]
        return jnp.where(positions >= 0, scores, 0.0).sum()

    grads = jax.grad(loss)(loaded.params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))

    loaded.reference.zero_grad()
    for prompt in prompts:
        logits = loaded.reference(torch.tensor(prompt, dtype=torch.int64)[None]).logits
        torch.log_softmax(logits, -1)[:, :, 5].sum().backward()
    named = dict(loaded.reference.named_parameters())
    pairs = [
        (grads["embedding"], named["model.embed_tokens.weight"].grad),
        (grads["final_norm"]["scale"], named["model.norm.weight"].grad),
        (grads["layers_0"]["feed_forward"]["down_kernel"], named["model.layers.0.mlp.down_proj.weight"].grad),
        (
            grads["layers_1"]["attention"]["qkv_bias"][:, -1].reshape(-1),
            named["model.layers.1.self_attn.v_proj.bias"].grad,
        ),
    ]
    for ours, theirs in pairs:
        scale = float(theirs.abs().max())
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=2e-5 * scale)


def test_initialised_tree_matches_a_loaded_one(loaded):
    """init and the checkpoint agree on every leaf's path and shape."""
    tokens = jnp.zeros((1, 2), jnp.int32)

    made = jax.eval_shape(lambda: loaded.model.init(jax.random.key(0), tokens, tokens)["params"])
    assert jax.tree.map(lambda leaf: leaf.shape, made) == jax.tree.map(lambda leaf: leaf.shape, loaded.params)


def test_bfloat16_computes_norms_softmax_and_logits_in_float32(load_kind):
    loaded = load_kind("llama")
    model = Transformer(loaded.model.config, dtype=jnp.bfloat16)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), loaded.params)
    prompt = _prompts()[0]
    positions = np.arange(len(prompt), dtype=np.int32)[None]
    hidden, cache = model.apply(
        {"params": params}, prompt[None], positions, KVCache.empty(model.config, 1, 16, jnp.bfloat16)
    )
    logits = model.apply({"params": params}, hidden, method="logits")
    assert hidden.dtype == jnp.bfloat16
    assert cache.keys[0].dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    assert not np.array_equal(logits, logits.astype(jnp.bfloat16).astype(jnp.float32))
    exact = loaded.reference_logits(prompt)
    assert np.abs(np.asarray(logits[0]) - exact).mean() < 0.05 * exact.std()
