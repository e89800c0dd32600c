"""The ledger and the spec without Ray: every request ends once, the last attempt is made alone."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest

from actors.causes import require_agreement
from actors.dispatch import Ledger, Loss
from actors.messages import Answer, GroupFailure, GroupResult, Rejection, WorkerDescription
from actors.spec import RetryPolicy
from sampling.errors import WorkerError
from sampling.types import Group, Request

LOSS = Loss("worker-0", "ActorDiedError", "worker-0 was lost")


def ledger(requests, max_attempts=3) -> Ledger:
    return Ledger(requests, itertools.count(), max_attempts)


def named(*prompt_ids: str) -> list[Request]:
    return [Request(prompt_id, np.array([1])) for prompt_id in prompt_ids]


def take(book: Ledger, idle: bool = True):
    taken = book.take(idle)
    assert taken is not None
    return taken


def test_each_request_ends_once():
    book = ledger(named("a", "b"))
    (a, alone), (b, _) = take(book), take(book)
    assert not alone and book.take(True) is None and not book.done()
    result = book.settle(Answer(b.ticket, Group("b", ())), "worker-1")
    assert isinstance(result, GroupResult) and result.worker == "worker-1"
    failure = book.settle(Answer(a.ticket, Rejection("PromptError", "empty")), "worker-0")
    assert failure == GroupFailure(a.request, "PromptError", "empty", 1, "worker-0")
    assert book.done()
    assert book.settle(Answer(a.ticket, Group("a", ())), "worker-0") is None
    assert book.lose([a.ticket, b.ticket], LOSS) == []


def test_a_lost_request_goes_out_again_under_another_ticket():
    book = ledger(named("a"))
    first, _ = take(book)
    assert book.lose([first.ticket], LOSS) == [] and not book.done()
    second, alone = take(book, idle=False)
    assert second.request is first.request and second.ticket != first.ticket and not alone
    assert book.settle(Answer(first.ticket, Group("a", ())), "worker-0") is None, "a late answer of a lost worker"
    assert isinstance(book.settle(Answer(second.ticket, Group("a", ())), "worker-1"), GroupResult)


def test_the_last_attempt_is_made_alone_and_convicts():
    book = ledger(named("a", "b"), max_attempts=2)
    a, b = take(book)[0], take(book)[0]
    assert book.lose([a.ticket, b.ticket], LOSS) == []
    assert book.take(idle=False) is None
    again, alone = take(book, idle=True)
    assert alone
    (failure,) = book.lose([again.ticket], LOSS)
    assert (failure.request, failure.attempts, failure.message) == (a.request, 2, LOSS.message)
    assert take(book)[0].request is b.request


def test_with_a_single_attempt_nobody_waits_to_be_alone():
    book = ledger(named("a"), max_attempts=1)
    assignment, alone = take(book, idle=False)
    assert not alone
    assert [failure.attempts for failure in book.lose([assignment.ticket], LOSS)] == [1]


def test_a_source_that_holds_back_is_stuck_only_if_nothing_runs():
    book = ledger(itertools.chain(named("a"), itertools.repeat(None)))
    a, _ = take(book)
    assert book.take(True) is None and not book.stuck
    book.settle(Answer(a.ticket, Group("a", ())), "worker-0")
    assert book.take(True) is None and book.stuck and not book.done()


def test_pauses_double():
    retry = RetryPolicy(backoff_s=0.5)
    assert [retry.pause_s(n) for n in (1, 2, 3, 4)] == [0.0, 0.5, 1.0, 2.0]


def test_workers_that_disagree_are_refused():
    def described(name, digest, threads):
        info: Any = None  # no test here looks at the checkpoint
        numerics = {"threads": threads, "jax": "1"}
        return WorkerDescription(name, "host", 1, "node", (), info, digest, numerics, "", 3, 1.0)

    standard = described("worker-0", "aa", 2)
    require_agreement(standard, described("worker-1", "aa", 2))
    with pytest.raises(WorkerError) as caught:
        require_agreement(standard, described("worker-1", "bb", 4))
    assert "weights_digest: 'aa' and 'bb'; threads: 2 and 4" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_end_is_seen_without_a_worker_to_ask_for():
    book = ledger(named("a"))
    assert not book.done() and not book.stuck
    a, _ = take(book)
    assert a.request.prompt_id == "a" and not book.done()
    book.settle(Answer(a.ticket, Group("a", ())), "worker-0")
    assert book.done()


def test_what_no_worker_has_seen_comes_first_again():
    book = ledger(named("a", "b"))
    a, _ = take(book)
    book.put_back(a)
    again, alone = take(book)
    assert again.request is a.request and not alone
    assert take(book)[0].request.prompt_id == "b"
