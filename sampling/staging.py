"""Staging: prompts that are read ahead of free slots, each once, whatever the number of its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from sampling.lanes import Lanes, lane_shape
from sampling.models import KVCache, Transformer
from sampling.models.mesh import made
from sampling.open_group import OpenGroup
from sampling.programs import empty_staging, is_lost
from sampling.types import Geometry
from sampling.waiting import WaitingLine


@dataclass
class _Seat:
    """A prompt in a row: what is still to be read of it, and whether the row holds another one's content."""

    group: OpenGroup
    unread: range
    used: bool = True

    @classmethod
    def of(cls, group: OpenGroup) -> Self:
        """A prompt of which nothing is read. Its last token is left to the first decode step."""
        return cls(group, range(group.request.prompt_tokens.size - 1))


class Staging:
    """Rows of a cache into which prompts are read.

    Args:
        model, geometry: of the engine.
    """

    def __init__(self, model: Transformer, geometry: Geometry) -> None:
        self._model, self._geometry = model, geometry
        self._lane_shape = lane_shape(geometry.prefill_chunk)
        self._seats: dict[int, _Seat] = {}  # those that came first stand first
        self.cache: KVCache = self._empty()

    def __len__(self) -> int:
        return len(self._seats)

    def seat(self, waiting: WaitingLine) -> None:
        """Takes requests from the line for as long as there are free rows."""
        for row in range(self._geometry.prefill_rows):
            if waiting and row not in self._seats:
                self._seats[row] = _Seat.of(waiting.next())

    def read(self, prefill: Callable[..., KVCache], params: Any) -> int:
        """Reads for one pass; returns the prompt tokens read."""
        rows, cache_len = self._geometry.prefill_rows, self._geometry.cache_len
        prompts, fresh = np.zeros((rows, cache_len), np.int32), np.zeros(rows, bool)
        for row, seat in self._seats.items():
            tokens = seat.group.request.prompt_tokens
            prompts[row, : tokens.size] = tokens
            fresh[row], seat.used = seat.used, False
        unread = {row: seat.unread for row, seat in self._seats.items()}
        lanes = Lanes.over(unread, *self._lane_shape)
        self.cache = prefill(params, self.cache, prompts, lanes, fresh)
        for row, left in lanes.left_of(unread).items():
            self._seats[row].unread = left
        return int(np.sum(lanes.end - lanes.begin))

    def ready(self) -> tuple[int, OpenGroup] | None:
        """Row and group of the first prompt that is read whole; None if there is none."""
        seats = self._seats.items()
        return next(((row, seat.group) for row, seat in seats if not (seat.used or seat.unread)), None)

    def restart(self) -> None:
        """Has every prompt read from its beginning again."""
        self._seats = {row: _Seat.of(seat.group) for row, seat in self._seats.items()}

    def leave(self, row: int) -> None:
        """Frees a row."""
        del self._seats[row]

    def abort(self) -> None:
        """Forgets every prompt."""
        self._seats.clear()
        if is_lost(self.cache):
            self.cache = self._empty()

    def _empty(self) -> KVCache:
        return made(self._model.mesh, partial(empty_staging, self._model, self._geometry))
