"""The other side of `rollout bench --against`: Transformers' generate, or vLLM, on the same prompts and lengths.

A script for whichever interpreter has the peer: `python bench_peers.py transformers`. It imports nothing of this
project. Lines of JSON go in and out. The first one in is the job; what comes out is `{"ready": facts}`, once model and
programs are warm. Every further line asks for one run and gets `{"seconds": S, "tokens": N, "peak_rss_mb": M}`. If the
peer is not installed, `{"missing": name}` comes out instead; any other failure ends the script with a traceback.

The job: `model` (a Transformers folder), `dtype`, `threads`, `slots`, `cache_len`, `cache_bytes` (keys and values of
all slots), `seed`, `sampling` (`temperature`, 0 for greedy; `top_k`, 0 for off; `top_p`) and `requests`, each with
`prompt` (ids), `n` (samples) and `new_tokens` (of each sample; nothing else ends it).
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Peer = tuple[Callable[[], int], dict[str, Any]]
"""Runs the workload and counts the tokens that were wanted; and what is to be known about the peer."""


def transformers_peer(job: dict[str, Any]) -> Peer:
    """Static batches, in the order of the requests. A batch lasts as long as its longest row."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(job["threads"])
    torch.manual_seed(job["seed"])
    kind = getattr(torch, job["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=kind, local_files_only=True).eval()
    model.generation_config = transformers.GenerationConfig()  # the checkpoint's own ends rows and sets filters
    filters = job["sampling"]
    drawing = {"do_sample": True, **filters} if filters["temperature"] else {"do_sample": False}
    rows = [
        (request["prompt"], request["new_tokens"]) for request in job["requests"] for _ in range(request["n"])
    ]  # a batch has no notion of samples that share a prompt
    batches = [rows[start : start + job["slots"]] for start in range(0, len(rows), job["slots"])]

    def generate(batch: list[tuple[list[int], int]], new_tokens: int) -> None:
        width = max(len(prompt) for prompt, _ in batch)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        config = transformers.GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=0, **drawing
        )
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=mask, generation_config=config)
        if output.shape[1] != width + new_tokens:
            raise RuntimeError(f"expected {new_tokens} new tokens, got {output.shape[1] - width}")

    def run() -> int:
        for batch in batches:
            generate(batch, max(new_tokens for _, new_tokens in batch))
        return sum(new_tokens for _, new_tokens in rows)

    generate(batches[0], 2)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    settings = {"threads": torch.get_num_threads(), "dtype": str(model.dtype), "batches": len(batches)}
    return run, {**versions, **settings, "attention": model.config._attn_implementation}


def vllm_peer(job: dict[str, Any]) -> Peer:
    """Continuous batching of at most `slots` rows, compiled as vLLM does by default."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its memory and threads are this process's
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # other work may hold the first cores
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(-(-2 * job["cache_bytes"] // 2**30)))  # GiB, twice the need
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    torch, vllm = importlib.import_module("torch"), importlib.import_module("vllm")
    llm = vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=job["cache_len"],
        max_num_seqs=job["slots"],
        seed=job["seed"],
        skip_tokenizer_init=True,
    )
    prompts = [{"prompt_token_ids": request["prompt"]} for request in job["requests"]]
    params = [
        vllm.SamplingParams(
            n=request["n"], max_tokens=request["new_tokens"], ignore_eos=True, detokenize=False, **job["sampling"]
        )
        for request in job["requests"]
    ]

    def run() -> int:
        llm.reset_prefix_cache()  # prompts of an earlier run are not to be found read
        answers = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(sample.token_ids) for answer in answers for sample in answer.outputs)

    run()
    model = llm.llm_engine.vllm_config.model_config
    versions = {"torch": torch.__version__, "vllm": vllm.__version__}
    settings = {"threads": torch.get_num_threads(), "dtype": str(model.dtype), "enforce_eager": model.enforce_eager}
    return run, {**versions, **settings}


PEERS = {"transformers": transformers_peer, "vllm": vllm_peer}


def serve(name: str, lines: Iterator[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Sets one peer up with the first line and runs it once for every further one."""
    job = json.loads(next(lines))
    try:
        run, facts = PEERS[name](job)
    except ModuleNotFoundError as error:
        answer({"missing": error.name})
        return
    answer({"ready": {"python": platform.python_version(), **facts}})
    for _ in lines:
        began = time.perf_counter()
        tokens = run()
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        answer({"seconds": seconds, "tokens": tokens, "peak_rss_mb": round(peak)})


def main() -> None:
    """Serves on standard input and output; whatever libraries print there goes to standard error."""
    sys.path.pop(0)  # this file's folder, whose modules are not for other libraries to import
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], iter(sys.stdin), lambda words: print(json.dumps(words), file=channel, flush=True))


if __name__ == "__main__":
    main()
