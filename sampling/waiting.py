"""WaitingLine: requests that nobody has begun, and who is next.

The rows that are still running when the line is empty hold up all the others, so the rows that may become longest begin
first (Graham 1969, "Bounds on multiprocessing timing anomalies": longest processing time first). The order changes no
bit of a row.
"""

from __future__ import annotations

from collections import deque

from sampling.open_group import OpenGroup


class WaitingLine:
    """Requests in rounds. Those of a round are taken by their budgets, the largest first, and equal ones as they came.

    Who comes while a round is being taken belongs to the next one, so that nobody waits for ever behind longer ones.
    """

    def __init__(self) -> None:
        self._round: deque[OpenGroup] = deque()
        self._newcomers: list[OpenGroup] = []

    def __len__(self) -> int:
        return len(self._round) + len(self._newcomers)

    def append(self, group: OpenGroup) -> None:
        """Lets a request wait."""
        self._newcomers.append(group)

    def next(self) -> OpenGroup:
        """Takes the request whose turn it is; there has to be one."""
        if not self._round:
            self._round.extend(sorted(self._newcomers, key=lambda group: group.budget, reverse=True))
            self._newcomers.clear()
        return self._round.popleft()

    def clear(self) -> None:
        """Forgets all."""
        self._round.clear()
        self._newcomers.clear()
