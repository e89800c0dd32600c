"""Which waiting request is next."""

import numpy as np

from sampling import Engine, Geometry, Request, SamplingParams, load_checkpoint
from sampling.open_group import OpenGroup
from sampling.waiting import WaitingLine
from tests.tiny_models import tiny_llama


def asked(prompt_id: str, budget: int, prompt_len: int = 3) -> Request:
    params = SamplingParams(max_new_tokens=budget, ignore_eos=True)
    return Request(prompt_id, np.arange(4, 4 + prompt_len), params)


def waiting(prompt_id: str, budget: int, prompt_len: int = 3) -> OpenGroup:
    request = asked(prompt_id, budget, prompt_len)
    return OpenGroup.of(request, request.params, cache_len=32)


def names(line: WaitingLine, count: int) -> list[str]:
    return [line.next().request.prompt_id for _ in range(count)]


def test_the_largest_budget_is_next_and_equal_ones_go_as_they_came():
    line = WaitingLine()
    for one in (waiting("a", 4), waiting("b", 9), waiting("c", 4), waiting("d", 5)):
        line.append(one)
    assert names(line, 4) == ["b", "d", "a", "c"]
    assert not line


def test_a_budget_is_what_the_cache_leaves_of_it():
    line = WaitingLine()
    for one in (waiting("ten", 10), waiting("no room", 20, prompt_len=27)):
        line.append(one)
    assert names(line, 2) == ["ten", "no room"]


def test_a_short_request_waits_for_its_own_round_and_no_longer():
    line = WaitingLine()
    line.append(waiting("short", 1))
    line.append(waiting("long", 8))
    assert names(line, 1) == ["long"]
    for i in range(5):
        line.append(waiting(f"newcomer {i}", 20))
    assert names(line, 2) == ["short", "newcomer 0"]
    assert len(line) == 4


def test_a_long_request_that_comes_last_does_not_hold_up_the_batch(tmp_path):
    checkpoint = load_checkpoint(tiny_llama(tmp_path))
    engine = Engine(checkpoint, Geometry(slots=2, cache_len=32, prefill_rows=2, prefill_chunk=8))
    groups = list(engine.generate([*(asked(f"short {i}", 4) for i in range(6)), asked("long", 16)]))
    assert len(groups) == 7
    assert engine.stats().steps == 20  # 40 tokens in two slots; begun last, the long one would run alone for 12 more
