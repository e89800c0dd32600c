"""Why a worker was lost, so that a person can act on it: Ray's errors in our words, and the process's last ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from actors.messages import WorkerDescription
from sampling.errors import WorkerError

LOG_LINES = 8
_LOG_TAIL_BYTES = 8192


def error_type(error: BaseException) -> str:
    """Class of the error that a worker raised, or of the one that Ray reports about it."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return type(cause).__name__


def in_words(error: BaseException) -> str:
    """What happened, on one line."""
    match error:
        case RayTaskError():
            return f"its engine raised {error_type(error)}: {error.cause}"
        case ActorDiedError():
            _, _, detail = str(error).partition("Worker exit detail: ")
            return f"its process died. {detail.partition(' Some common causes')[0]}".rstrip()
        case ActorUnavailableError():
            return "its process cannot be reached"
        case StopIteration():
            return "it stopped serving"
        case _:
            return str(error) or type(error).__name__


def last_lines(files: Sequence[str]) -> list[str]:
    """The last lines of a worker's log files, as far as they lie on this machine."""
    lines: list[str] = []
    for path in map(Path, files):
        if path.is_file():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
                lines += file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    return [line for line in lines if line.strip() and not line.startswith(":")]  # Ray marks names with a colon


def require_agreement(standard: WorkerDescription, newcomer: WorkerDescription) -> None:
    """Refuses a worker whose results could differ from those of the others.

    Raises:
        WorkerError: weights or numerics differ; the message says in what.
    """
    ours, theirs = (
        {"weights_digest": each.weights_digest, "canary_logprobs": each.canary_logprobs, **each.fingerprint}
        for each in (standard, newcomer)
    )
    names = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
    if names:
        differing = "; ".join(f"{name}: {ours.get(name)!r} and {theirs.get(name)!r}" for name in names)
        raise WorkerError(
            f"{standard.name} on {standard.host} and {newcomer.name} on {newcomer.host} would not draw the same"
            f" bits. {differing}. Use hosts of one kind, with the same checkpoint and the same releases"
        )
