"""EngineStats: what an engine has done so far."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made.

    Attributes:
        slots: slots in all; slots_busy: of them with a running row.
        waiting: requests not yet admitted in full.
        groups, completions, tokens: finished, and drawn in all.
        steps: decode steps; row_steps: rows that they computed, by the width of their programs; busy_row_steps: of
            these, rows that were advanced.
        prefill_tokens: prompt tokens read.
        scored_tokens: given tokens scored by forward passes.
        programs_compiled: grows only with a policy that needs more capacity than any before it.
    """

    slots: int
    slots_busy: int
    waiting: int
    groups: int
    completions: int
    tokens: int
    steps: int
    row_steps: int
    busy_row_steps: int
    prefill_tokens: int
    scored_tokens: int
    programs_compiled: int
