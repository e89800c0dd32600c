"""Lanes: stretches of several sequences that one forward pass reads side by side.

A pass has a fixed number of tokens, whose products are what it costs. Cut into lanes, they serve one long sequence or
many short ones. A place of a sequence stands at the same place of a lane whoever reads beside it, and lanes are rows
of the same products; so the bits of a hidden state depend on its sequence alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sampling.models import KVCache, Transformer
from sampling.types import LANE_TOKENS


class Lanes(struct.PyTreeNode):
    """Which stretches a pass reads. Lanes that nobody needs read nothing.

    Attributes:
        row: int32 [lanes], the row of cache and buffer that the lane's sequence has.
        start: int32 [lanes], place of the lane's first token in it, a multiple of the lane's length.
        begin, end: int32 [lanes], of the places of the lane, those from `begin` to before `end` are read.
    """

    row: Any
    start: Any
    begin: Any
    end: Any

    @classmethod
    def over(cls, unread: Mapping[int, range], num_lanes: int, lane_len: int) -> Lanes:
        """The next lanes, on the host.

        Args:
            unread: by row, the places that are still to be read. Rows come first that stand first.
            num_lanes, lane_len: of the pass.
        """
        row, start, begin, end = np.zeros((4, num_lanes), np.int32)
        lane = 0
        for place, left in unread.items():
            while left and lane < num_lanes:
                first = left.start // lane_len * lane_len
                stop = min(first + lane_len, left.stop)
                row[lane], start[lane], begin[lane], end[lane] = place, first, left.start, stop
                left, lane = range(stop, left.stop), lane + 1
        return cls(row, start, begin, end)

    def left_of(self, unread: Mapping[int, range]) -> dict[int, range]:
        """What is still to be read after these lanes; NumPy leaves, on the host."""
        return {
            row: range(max(left.start, *self.end[self.row == row].tolist(), 0), left.stop)
            for row, left in unread.items()
        }

    def places(self, lane_len: int) -> tuple[jax.Array, jax.Array]:
        """int32 [lanes, lane_len], places in the sequences; and bool, those that are read."""
        places = self.start[:, None] + jnp.arange(lane_len, dtype=jnp.int32)[None, :]
        return places, (places >= self.begin[:, None]) & (places < self.end[:, None])


def lane_shape(tokens: int) -> tuple[int, int]:
    """Lanes, and tokens of each, of a pass of so many tokens."""
    lane_len = min(LANE_TOKENS, tokens)
    return tokens // lane_len, lane_len


def read_lanes(
    model: Transformer, params: Any, cache: KVCache, buffer: jax.Array, lanes: Lanes, lane_len: int
) -> tuple[jax.Array, KVCache]:
    """Reads the lanes.

    Args:
        cache: of the sequences so far.
        buffer: int32 [rows, capacity], the sequences' tokens.
    Returns:
        Hidden states [lanes, lane_len, width], and the cache with the lanes' tokens in it.
    """
    places, read = lanes.places(lane_len)
    tokens = jnp.where(read, buffer[lanes.row[:, None], jnp.minimum(places, buffer.shape[1] - 1)], 0)
    forward: Any = partial(model.apply, {"params": params})
    return forward(tokens, jnp.where(read, places, -1), cache, lanes.row)
