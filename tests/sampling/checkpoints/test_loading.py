"""Safetensors to params: every tensor accounted for before the first one is read."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from sampling.checkpoints import load_checkpoint, weights_digest
from sampling.errors import CheckpointError
from sampling.models import Transformer
from tests.tiny_models import tiny_llama, tiny_qwen2


@pytest.fixture
def llama(tmp_path) -> Path:
    return tiny_llama(tmp_path / "llama")


def _edit(directory: Path, edit) -> None:
    """Applies `edit` to the dict of stored tensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_shards_give_the_same_bits_as_one_file(llama, tmp_path):
    sharded = tiny_llama(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = load_checkpoint(llama), load_checkpoint(sharded)
    assert weights_digest(one.params) == weights_digest(many.params)


@pytest.mark.parametrize(
    ("stored", "dtype"), [(torch.bfloat16, jnp.float32), (torch.float16, jnp.float32), (torch.float32, jnp.bfloat16)]
)
def test_dtypes(tmp_path, stored, dtype):
    """A half-precision file widens exactly; a wide one rounds to nearest."""
    path = tiny_llama(tmp_path, dtype=stored)
    params = load_checkpoint(path, dtype=dtype).params
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    assert params["embedding"].dtype == dtype
    np.testing.assert_array_equal(params["embedding"], embedding.astype(dtype))


def test_progress_ends_at_the_total(llama):
    calls = []
    params = load_checkpoint(llama, progress=lambda done, total: calls.append((done, total))).params
    done, totals = zip(*calls, strict=True)
    assert list(done) == sorted(done)
    assert {done[-1]} == set(totals)
    assert done[-1] == weights_bytes(params)


def test_a_processor_shares_the_arrays_that_were_loaded(llama):
    """Weights are in memory once: JAX copies an array at another address, and nobody may write to a shared one."""
    params = load_checkpoint(llama).params
    for array in jax.tree.leaves(params):
        assert jax.device_put(array, jax.devices("cpu")[0]).unsafe_buffer_pointer() == array.ctypes.data
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def weights_bytes(params) -> int:
    return sum(leaf.nbytes if hasattr(leaf, "nbytes") else weights_bytes(leaf) for leaf in params.values())


# --- case B056: the head ---

EMBED = [[1, 0], [0, 1], [1, 1]]
HEAD = [[0, 1], [1, 0], [2, -1]]
HIDDEN = np.array([0.5, 2.0], np.float32)


def _three_tokens(path: Path, tied: bool, head) -> Path:
    """A model of width 2 and 3 tokens, with the case's embedding and head."""
    tiny_qwen2(
        path,
        vocab_size=3,
        hidden_size=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_hidden_layers=1,
        eos_token_id=None,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))

    def edit(tensors):
        tensors["model.embed_tokens.weight"] = np.array(EMBED, np.float32)
        if head is not None:
            tensors["lm_head.weight"] = np.array(head, np.float32)

    _edit(path, edit)
    return path


def _case_logits(path: Path) -> np.ndarray:
    checkpoint = load_checkpoint(path)
    model = Transformer(checkpoint.info.config)
    return np.asarray(model.apply({"params": checkpoint.params}, HIDDEN, method="logits"))


def test_untied_head_is_used(tmp_path):
    np.testing.assert_array_equal(_case_logits(_three_tokens(tmp_path, False, HEAD)), [2.0, 0.5, -1.0])


def test_tied_head_is_the_embedding(tmp_path):
    np.testing.assert_array_equal(_case_logits(_three_tokens(tmp_path, True, None)), [0.5, 2.0, 2.5])


def test_tied_head_beside_an_equal_one_is_silent(tmp_path):
    path = _three_tokens(tmp_path, True, EMBED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(_case_logits(path), [0.5, 2.0, 2.5])


def test_tied_head_beside_another_one_warns(tmp_path):
    path = _three_tokens(tmp_path, True, HEAD)
    with pytest.warns(UserWarning, match=r"lm_head\.weight: differs from model\.embed_tokens\.weight"):
        np.testing.assert_array_equal(_case_logits(path), [0.5, 2.0, 2.5])


def test_untied_head_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected tensor lm_head\.weight \[3, 2\] for parameter head"):
        load_checkpoint(_three_tokens(tmp_path, False, None))


def test_updating_tied_weights_changes_both_uses(tmp_path):
    checkpoint = load_checkpoint(_three_tokens(tmp_path, True, None))
    model = Transformer(checkpoint.info.config)
    params = checkpoint.params | {"embedding": 2 * checkpoint.params["embedding"]}
    np.testing.assert_array_equal(model.apply({"params": params}, HIDDEN, method="logits"), [1.0, 4.0, 5.0])


# --- what is refused ---


def test_missing_tensor(llama):
    _edit(llama, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(
        CheckpointError, match=r"k_proj\.weight \[12, 32\] for parameter layers_1/attention/qkv_kernel, found none"
    ):
        load_checkpoint(llama)


def test_surplus_tensor(llama):
    _edit(llama, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": np.zeros((2, 2))[:1]}))
    with pytest.raises(CheckpointError, match="F64"):
        load_checkpoint(llama)
    _edit(llama, lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor model\.layers\.2\.mlp.*no parameter"):
        load_checkpoint(llama)


def test_known_harmless_surplus_is_dropped(llama):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _edit(llama, lambda tensors: tensors.update({name: np.zeros(3, np.float32)}))
    load_checkpoint(llama)


def test_misshapen_tensor(llama):
    name = "model.layers.0.mlp.down_proj.weight"
    _edit(llama, lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name].T)}))
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors: tensor .*expected shape \[32, 40\] for parameter"
        r" layers_0/feed_forward/down_kernel, got \[40, 32\]",
    ):
        load_checkpoint(llama)


def test_nothing_is_read_before_everything_is_checked(llama, monkeypatch):
    _edit(llama, lambda tensors: tensors.pop("model.norm.weight"))
    monkeypatch.setattr("sampling.checkpoints.safetensors_files.SafetensorsFiles.read", None)
    with pytest.raises(CheckpointError, match="final_norm/scale"):
        load_checkpoint(llama)


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_truncated_file(llama, kept):
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a complete safetensors file"):
        load_checkpoint(llama)


def test_missing_file(llama):
    (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or model\.safetensors\.index\.json"):
        load_checkpoint(llama)


def test_missing_shard(tmp_path):
    path = tiny_llama(tmp_path, max_shard_size="20KB")
    shards = sorted(path.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=rf"{shards[1].name}: named by .*copy all {len(shards)} shards"):
        load_checkpoint(path)


# --- the digest ---


def test_digest_depends_on_bits_and_names_alone():
    params = {"b": {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}, "a": np.ones(2, np.float32)}
    digest = weights_digest(params)
    assert digest == weights_digest({"a": params["a"], "b": {"x": jnp.asarray(params["b"]["x"])}})
    assert digest == weights_digest({"a": params["a"], "b": {"x": np.asfortranarray(params["b"]["x"])}})
    changed = [
        {**params, "a": np.nextafter(params["a"], np.float32(2))},
        {**params, "a": params["a"].astype(ml_dtypes.bfloat16)},
        {**params, "a": params["a"][None]},
        {"c": params["b"], "a": params["a"]},
        {"b/x": params["b"]["x"], "a": params["a"][:1]},
    ]
    assert len({digest, *map(weights_digest, changed)}) == 1 + len(changed)


def test_digest_tells_negative_zero_from_zero():
    assert weights_digest({"a": np.zeros(1)}) != weights_digest({"a": -np.zeros(1)})


@pytest.mark.parametrize(
    "text", ["{}", "{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 5}}', '{"weight_map": {}}']
)
def test_a_damaged_index_is_refused_by_name(tmp_path, text):
    path = tiny_llama(tmp_path, max_shard_size="10KB")
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index.json: (weight_map: )?expected a"):
        load_checkpoint(path)


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    path = tiny_llama(tmp_path)
    real = Path.open

    def denied(self, *args, **kwargs):
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: Permission denied$"):
        load_checkpoint(path)


def test_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        load_checkpoint("x" * 300)
