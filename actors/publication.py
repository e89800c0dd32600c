"""publish: new weights for every worker of a pool, or for none.

All workers check the weights first, while they draw with the old ones. If one refuses them, or they do not agree, that
is the end of it. Otherwise they are the pool's weights from that moment on: the workers take them over, and whoever is
lost meanwhile is replaced by a worker that has them.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from actors.causes import in_words
from actors.handle import WorkerHandle
from actors.messages import Publication, Shipment, Staged
from actors.supervision import Crew, Event
from sampling.checkpoints import weights_digest
from sampling.errors import CheckpointError, ConfigError, ServiceError, WorkerError
from sampling.scoring import FORWARD_BOUND
from sampling.weights import require_version

_log = logging.getLogger(__name__)

PUSHES = 2
"""Times that weights are sent before it is given up that they arrive undamaged."""

POLL_S = 0.05
"""Longest wait for something to happen before deadlines are looked at again."""


class _DamagedError(CheckpointError):
    """Weights that are other ones where they arrived."""


def publish(
    crew: Crew,
    params: Mapping[str, Any],
    version: int,
    canary: np.ndarray | None,
    dtype: str,
    deadline_s: float,
    hear: Callable[[list[Event]], None],
) -> Publication:
    """See `WorkerPool.publish`.

    Args:
        crew: the workers.
        dtype: of their engines.
        deadline_s: for a worker to check the weights, and again to take them over.
        hear: takes the events that concern others.
    """
    require_version(version)
    old = crew.standard.policy_version
    if version <= old:
        raise ConfigError(f"version: expected more than {old}, the version in service, got {version}")
    began = time.monotonic()
    try:
        accept = partial(_require_publishers, params=params, canary=canary, dtype=dtype)
        shipment, staged, put = _pushed(crew, params, version, deadline_s, hear, accept)
    except (CheckpointError, WorkerError, RayError) as error:
        _withdraw(crew)
        words = f"the weights of version {version} are not in service, version {old} stays: {error}"
        raise (CheckpointError if isinstance(error, CheckpointError) else WorkerError)(words) from error
    except BaseException:
        _withdraw(crew)
        raise
    checked = time.monotonic()
    crew.adopt(shipment, staged)
    stood_still_s = _swapped(crew, shipment, staged, hear)
    return Publication(
        version=version,
        put_s=put - began,
        staged_s=checked - put,
        swapped_s=time.monotonic() - checked,
        stood_still_s=stood_still_s,
        **dataclasses.asdict(staged),
    )


def _pushed(
    crew: Crew,
    params: Mapping[str, Any],
    version: int,
    deadline_s: float,
    hear: Callable[[list[Event]], None],
    accept: Callable[[Staged], None],
) -> tuple[Shipment, Staged, float]:
    """Weights that every worker has received as they are; with what was found of them, and when they were put."""
    for pushes_left in reversed(range(PUSHES)):
        shipment = Shipment(version, (ray.put(jax.tree.map(np.asarray, params)),), deadline_s)
        put = time.monotonic()
        try:
            staged = _staged(crew, shipment, hear)
            accept(staged)
            return shipment, staged, put
        except _DamagedError as error:
            if not pushes_left:
                raise
            _log.warning("weights of version %d are sent again: %s", version, error)
            _withdraw(crew)
    raise AssertionError("the last push returns or raises")


def _staged(crew: Crew, shipment: Shipment, hear: Callable[[list[Event]], None]) -> Staged:
    """What all workers that are ready, and at least one, have found of the weights."""
    while True:
        ready = crew.ready
        for worker in ready:
            if isinstance(worker.reply, RayTaskError):
                raise _refusal(worker)
            if worker.asked is None and worker.reply is None:
                worker.ask(worker.actor.stage.remote(shipment))
        if ready and all(worker.reply for worker in ready):
            break
        hear(crew.poll(POLL_S))
    first, *others = ready
    for worker in others:
        _require_same(first.reply, worker.reply, first.name, worker.name)
    return first.reply


def _swapped(crew: Crew, shipment: Shipment, staged: Staged, hear: Callable[[list[Event]], None]) -> float:
    """Lets the workers take the weights over; returns the longest that one stood still.

    One that does not is lost, and its replacement starts with them.
    """
    longest_s = 0.0
    waiting = list(crew.ready)
    for worker in waiting:
        worker.ask(worker.actor.swap.remote(shipment.version, shipment.deadline_s))
    while waiting:
        for worker in list(waiting):
            if isinstance(worker.reply, RayTaskError):
                hear(crew.lose(worker, worker.reply))
            elif worker.reply is not None and worker.description:
                longest_s = max(longest_s, worker.reply)
                worker.reply = None
                news = {"policy_version": shipment.version, **dataclasses.asdict(staged)}
                worker.description = dataclasses.replace(worker.description, **news)
            elif worker.asked is not None:
                continue
            waiting.remove(worker)
        if waiting:
            hear(crew.poll(POLL_S))
    return longest_s


def _withdraw(crew: Crew) -> None:
    for worker in crew.ready:
        worker.asked = worker.reply = None
        worker.actor.unstage.remote()


def _refusal(worker: WorkerHandle) -> ServiceError:
    """What a worker has said against weights, as an error that names it."""
    cause = worker.reply.cause
    if isinstance(cause, CheckpointError):
        return CheckpointError(f"{worker.name}: {cause}")
    return WorkerError(f"{worker.name}: {in_words(worker.reply)}")


def _require_publishers(staged: Staged, params: Mapping[str, Any], canary: np.ndarray | None, dtype: str) -> None:
    """Refuses weights that are not, or do not score like, those of the publisher."""
    _require_same(Staged(weights_digest(params), staged.canary_logprobs), staged, "the publisher", "the workers")
    if canary is None:
        return
    theirs, ours = np.asarray(staged.canary_logprobs), np.asarray(canary, np.float64)
    if ours.shape != theirs.shape:
        raise CheckpointError(f"canary: expected {list(theirs.shape)} log-probs, got {list(ours.shape)}")
    share, bound = FORWARD_BOUND[dtype]
    far = float(np.quantile(np.abs(theirs - ours), share, method="higher"))
    if not far <= bound:
        raise CheckpointError(
            f"expected the workers' log-probs of the canary within {bound} nats of the publisher's, got {far:.2e};"
            " do both compute the same model?"
        )


def _require_same(expected: Staged, found: Staged, whose: str, theirs: str) -> None:
    if found.weights_digest != expected.weights_digest:
        raise _DamagedError(
            f"expected {theirs} to have received digest {expected.weights_digest}, that of {whose},"
            f" got {found.weights_digest}"
        )
    for one, other in zip(expected.canary_logprobs, found.canary_logprobs, strict=True):
        if one != other:
            raise CheckpointError(
                f"expected the same bits of the canary's log-probs from {whose} and {theirs}, got {one!r} and {other!r}"
            )
