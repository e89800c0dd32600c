"""Tokenizers out of directories and GGUF files, and that neither needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sampling.checkpoints import inspect_checkpoint, load_tokenizer
from sampling.errors import CheckpointError
from tests.tiny_gguf import tiny_gguf
from tests.tiny_models import TOKENIZER_LEN, byte_tokenizer, tiny_llama

TEXTS = [
    "the thing  in\n\n the end: 12 + 345 = 357\t½ ² naïve 日本",
    "<|im_start|>user\nhi<|im_end|>\n<|not_special|>",
    "I'll DON'T they're",
    "",
]
MESSAGES = [{"role": "user", "content": "the thing"}]


@pytest.mark.parametrize("make", [tiny_llama, lambda path: tiny_gguf(path)[0]], ids=["directory", "gguf"])
def test_the_saved_tokenizer_comes_back(tmp_path, make):
    tokenizer, saved = load_tokenizer(inspect_checkpoint(make(tmp_path))), byte_tokenizer()
    assert len(tokenizer) == TOKENIZER_LEN
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == saved(text).input_ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == saved.decode(ids, skip_special_tokens=True)
    options = {"add_generation_prompt": True, "return_dict": False}
    assert tokenizer.apply_chat_template(MESSAGES, **options) == saved.apply_chat_template(MESSAGES, **options)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(tokenizer, name) == getattr(saved, name)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("default", ["a", "Ġ1234", "Ġthing", "'s", "ĊĊ"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "Ġthing", "'s", "ĊĊ"]),
        ("llama-bpe", ["a", "Ġ", "123", "4", "Ġthing", "'s", "ĊĊ"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "Ġthing", "'s", "ĊĊ"]),
    ],
)
def test_text_is_cut_as_the_vocabulary_was_learned(tmp_path, pre, pieces):
    path, _ = tiny_gguf(tmp_path, metadata={"tokenizer.ggml.pre": pre})
    tokenizer = load_tokenizer(inspect_checkpoint(path))
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 1234 thing's\n\n")
    assert [piece for piece, _ in cut] == pieces


@pytest.mark.parametrize(("adds_bos", "expected"), [(True, 1), (False, 0)])
def test_the_file_says_whether_bos_is_added(tmp_path, adds_bos, expected):
    path, _ = tiny_gguf(tmp_path, metadata={"tokenizer.ggml.add_bos_token": adds_bos})
    tokenizer = load_tokenizer(inspect_checkpoint(path))
    assert tokenizer("hi").input_ids.count(tokenizer.bos_token_id) == expected
    templated = tokenizer.apply_chat_template(MESSAGES, return_dict=False)
    assert templated.count(tokenizer.bos_token_id) == 0, "the template writes no BOS, and none is added to it"


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"tokenizer.ggml.model": "llama"}, "model = 'llama' is not supported; expected 'gpt2'"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre = 'tekken' is not supported; supported are default"),
    ],
)
def test_other_tokenizers_are_named(tmp_path, metadata, named):
    path, _ = tiny_gguf(tmp_path, metadata=metadata)
    with pytest.raises(CheckpointError, match=named):
        load_tokenizer(inspect_checkpoint(path))


def test_a_directory_without_tokenizer(tmp_path):
    path = tiny_llama(tmp_path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected a tokenizer\.json, found none"):
        load_tokenizer(inspect_checkpoint(path))


def test_a_damaged_tokenizer(tmp_path):
    path = tiny_llama(tmp_path)
    info = inspect_checkpoint(path)
    (path / "tokenizer.json").write_text('{"model": {"type": "?"}}')
    with pytest.raises(CheckpointError, match="the tokenizer cannot be read"):
        load_tokenizer(info)


@pytest.mark.parametrize("make", [tiny_llama, lambda path: tiny_gguf(path)[0]], ids=["directory", "gguf"])
def test_torch_is_not_needed(tmp_path, make):
    """In a process where importing torch fails, weights and tokenizer still load."""
    path = make(tmp_path)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from sampling.checkpoints import load_checkpoint, load_tokenizer\n"
        f"checkpoint = load_checkpoint({str(path)!r})\n"
        "print(load_tokenizer(checkpoint.info)('the').input_ids)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(byte_tokenizer()("the").input_ids)
    assert "PyTorch" not in done.stderr


def test_real_warnings_of_transformers_are_shown(tmp_path):
    path = tiny_llama(tmp_path)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from sampling.checkpoints import inspect_checkpoint, load_tokenizer\n"
        f"load_tokenizer(inspect_checkpoint({str(path)!r}))\n"
        "from transformers.utils import logging\n"
        "logging.get_logger('transformers').warning_advice('advice on something else')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True
    )
    assert "advice on something else" in done.stderr


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tokenizer.json", {"added_tokens": [{"id": 0, "content": "a"}]}),
        ("tokenizer_config.json", {"extra_special_tokens": [5]}),
        ("config.json", {"use_cache": [1]}),
    ],
)
def test_whatever_transformers_trips_over_is_one_error_of_ours(tmp_path, name, changes):
    path = tiny_llama(tmp_path)
    settings = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps(settings | changes))
    with pytest.raises(CheckpointError, match="the tokenizer cannot be read"):
        load_tokenizer(inspect_checkpoint(path))
