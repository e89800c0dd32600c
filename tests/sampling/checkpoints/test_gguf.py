"""GGUF files: every storage type, every architecture, and each way of being unreadable."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from sampling.checkpoints import CheckpointFormat, inspect_checkpoint, load_checkpoint, load_tokenizer
from sampling.checkpoints.gguf_file import GGUFFile
from sampling.errors import CheckpointError
from sampling.models import RopeScaling, Transformer
from tests.tiny_gguf import tiny_gguf
from tests.tiny_models import EOS_ID, TOKENIZER_LEN

TOKENS = np.random.default_rng(0).integers(0, TOKENIZER_LEN, 9, dtype=np.int32)


def _assert_same_logits(path, reference: torch.nn.Module) -> None:
    checkpoint = load_checkpoint(path)
    model, variables = Transformer(checkpoint.info.config), {"params": checkpoint.params}
    positions = np.arange(len(TOKENS), dtype=np.int32)
    hidden, _ = model.apply(variables, TOKENS[None], positions[None])
    logits = model.apply(variables, hidden, method="logits")
    with torch.no_grad():
        expected = reference(torch.tensor(TOKENS, dtype=torch.int64)[None]).logits.numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name
)
def test_every_storage_type_gives_the_logits_of_its_dequantised_weights(tmp_path, kind):
    _assert_same_logits(*tiny_gguf(tmp_path, kind))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_every_architecture(tmp_path, family):
    """Only llama's converter interleaves the rows of queries and keys."""
    path, reference = tiny_gguf(tmp_path, Kind.Q8_0, family)
    config = inspect_checkpoint(path).config
    assert (config.family, config.qkv_bias, config.qk_norm) == (family, family == "qwen2", family == "qwen3")
    _assert_same_logits(path, reference)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_tied_where_the_file_has_none(tmp_path, tied):
    path, reference = tiny_gguf(tmp_path, tie_word_embeddings=tied)
    assert inspect_checkpoint(path).config.tied_head is tied
    _assert_same_logits(path, reference)


def test_rope_divisors_of_llama3(tmp_path):
    """llama.cpp stores Llama 3's stretched frequencies as a table of divisors."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    frequencies = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    wavelengths = 2 * np.pi / frequencies
    smooth = np.clip((64 / wavelengths - 1) / (4 - 1), 0, 1)
    divisors = (1 / (smooth + (1 - smooth) / 8)).astype(np.float32)
    path, reference = tiny_gguf(tmp_path, extra={"rope_freqs.weight": divisors}, rope_parameters=rope)
    scaling = inspect_checkpoint(path).config.rope_scaling
    assert scaling == RopeScaling("table", divisors=tuple(divisors.tolist()))
    _assert_same_logits(path, reference)


def test_linear_rope_scaling(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    _assert_same_logits(*tiny_gguf(tmp_path, metadata=metadata, rope_parameters=rope))


def test_what_inspection_finds(tmp_path):
    path, _ = tiny_gguf(tmp_path, metadata={"tokenizer.ggml.eot_token_id": 0})
    info = inspect_checkpoint(path)
    assert (info.path, info.format, info.name) == (path, CheckpointFormat.GGUF, "Tiny")
    assert info.eos_token_ids == (0, EOS_ID)
    assert (info.tokenizer_len, info.config.vocab_size) == (TOKENIZER_LEN, 272)


def test_header_equals_the_gguf_packages_reading(tmp_path):
    path, _ = tiny_gguf(tmp_path, Kind.Q4_0, metadata={"x.text": "å", "x.number": -0.5, "x.flag": True})
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert len(ours.shapes) == len(theirs.tensors)


# --- the two k-quants, which the gguf package can read but not write ---


def _numbers(*shape: int, high: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, shape, dtype=np.uint8)


def _one_tensor_file(path, raw: bytes, rows: int, kind: Kind) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x.weight", np.frombuffer(raw, np.uint8).reshape(rows, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def test_q4_k_against_a_block_packed_by_hand(tmp_path):
    """256 numbers in 8 groups of 32: value = d * scale * q - dmin * minimum, q of 4 bits, scale and minimum of 6."""
    raw, expected = b"", []
    for row in range(2):
        scales, minima = _numbers(8, high=64, seed=row), _numbers(8, high=64, seed=row + 10)
        quants = _numbers(8, 32, high=16, seed=row + 20)
        d, dmin = np.float16(0.03 + row), np.float16(0.007)
        packed = [int(scales[j]) | (int(scales[j + 4]) >> 4) << 6 for j in range(4)]
        packed += [int(minima[j]) | (int(minima[j + 4]) >> 4) << 6 for j in range(4)]
        packed += [int(scales[j + 4]) & 15 | (int(minima[j + 4]) & 15) << 4 for j in range(4)]
        nibbles = [quants[g] | quants[g + 1] << 4 for g in range(0, 8, 2)]
        raw += d.tobytes() + dmin.tobytes() + bytes(packed) + b"".join(n.tobytes() for n in nibbles)
        expected.append(
            np.float32(d) * scales[:, None].astype(np.float32) * quants
            - np.float32(dmin) * minima[:, None].astype(np.float32)
        )
    got = _one_tensor_file(tmp_path / "k.gguf", raw, 2, Kind.Q4_K).read("x.weight")
    np.testing.assert_allclose(got, np.stack(expected).reshape(2, 256), rtol=1e-6)


def test_q6_k_against_a_block_packed_by_hand(tmp_path):
    """256 numbers in 16 groups of 16: value = d * scale * (q - 32), q of 6 bits, scale a signed byte."""
    quants = _numbers(2, 4, 32, high=64, seed=0)  # two halves of four runs of 32
    scales = _numbers(16, high=255, seed=1).view(np.int8)
    d = np.float16(0.02)
    low = b"".join(
        (quants[half, run] & 15 | (quants[half, run + 2] & 15) << 4).tobytes() for half in range(2) for run in range(2)
    )
    high = b"".join(
        (quants[half] >> 4 << np.array([[0], [2], [4], [6]], np.uint8)).sum(0).astype(np.uint8).tobytes()
        for half in range(2)
    )
    raw = low + high + scales.tobytes() + d.tobytes()
    got = _one_tensor_file(tmp_path / "k.gguf", raw, 1, Kind.Q6_K).read("x.weight")
    expected = np.float32(d) * scales[:, None] * (quants.reshape(16, 16).astype(np.float32) - 32)
    np.testing.assert_allclose(got, expected.reshape(1, 256), rtol=1e-6)


# --- what is refused ---


def test_unsupported_storage_type_is_named(tmp_path):
    path, _ = tiny_gguf(tmp_path, Kind.Q5_0)
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is stored as Q5_0; supported are F32"):
        inspect_checkpoint(path)


@pytest.mark.parametrize("family", ["gemma", "phi3"])
def test_unsupported_architecture_is_named(tmp_path, family):
    path, _ = tiny_gguf(tmp_path, metadata={"general.architecture": family})
    with pytest.raises(CheckpointError, match=f"'{family}' is not supported; supported are llama, qwen2, qwen3"):
        inspect_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "scaling.type = 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8.*head_dim = 16"),
        ({"llama.expert_count": 4}, "expert_count = 4"),
        ({"llama.attention.sliding_window": 4}, "sliding_window = 4"),
    ],
)
def test_unsupported_settings_are_named(tmp_path, metadata, named):
    path, _ = tiny_gguf(tmp_path, metadata=metadata)
    with pytest.raises(CheckpointError, match=named):
        inspect_checkpoint(path)


def test_surplus_tensor_is_named(tmp_path):
    path, _ = tiny_gguf(tmp_path, extra={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_sinks\.weight: the model has no parameter"):
        load_checkpoint(path)


def test_missing_tensor_is_named_by_parameter(tmp_path):
    path, _ = tiny_gguf(tmp_path, metadata={"llama.block_count": 3})
    with pytest.raises(CheckpointError, match="layers_2/attention_norm/scale, found none"):
        load_checkpoint(path)


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 200, 3000, -1])
def test_truncated_file(tmp_path, kept):
    path, _ = tiny_gguf(tmp_path)
    content = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match=r"truncated.*copy it again"):
        inspect_checkpoint(cut)


def test_other_content_under_the_name(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(CheckpointError, match="does not start with 'GGUF'"):
        inspect_checkpoint(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1))
    with pytest.raises(CheckpointError, match="version 1"):
        inspect_checkpoint(path)


def test_damaged_header(tmp_path):
    path, _ = tiny_gguf(tmp_path)
    content = path.read_bytes()
    key = content.index(b"general.architecture") + len("general.architecture")
    path.write_bytes(content[:key] + struct.pack("<I", 99) + content[key + 4 :])
    with pytest.raises(CheckpointError, match="damaged GGUF header"):
        inspect_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", "2", "llama.block_count: expected a number, got '2'"),
        ("llama.block_count", 10**6, "llama.block_count: expected at most 10000, got 1000000"),
        ("llama.attention.head_count", 0, "llama.attention.head_count: expected a whole number above 0, got 0"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "layer_norm_rms_epsilon: expected a number, got nan"),
        ("llama.context_length", 0.5, "llama.context_length: expected a whole number above 0, got 0.5"),
        ("tokenizer.ggml.eos_token_id", 5000, "end-of-sequence id: expected that of a token, .*, got 5000"),
    ],
)
def test_a_setting_of_another_kind_is_named(tmp_path, key, value, message):
    path, _ = tiny_gguf(tmp_path, metadata={key: value})
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(path)


def test_a_special_token_outside_the_vocabulary_is_named(tmp_path):
    path, _ = tiny_gguf(tmp_path, metadata={"tokenizer.ggml.bos_token_id": 5000})
    with pytest.raises(CheckpointError, match=r"bos_token_id: expected the id of a token, in 0 \.\. \d+, got 5000"):
        load_tokenizer(inspect_checkpoint(path))
