"""Rows whose grammars are stepped on the host: masks before a decode step, and what matchers say after it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import jax
import numpy as np

from sampling.decode import EngineState
from sampling.grammar.tables import COMPLETE, FULL, GrammarTables, no_masks
from sampling.models.mesh import ModelMesh, placed
from sampling.open_group import Resident
from sampling.types import StopReason

log = logging.getLogger(__name__)

_BEFORE_GRAMMARS = [reason.code for reason in (StopReason.EOS, StopReason.STOP_TOKEN, StopReason.STOP_STRING)]
"""Reasons that come before the grammar's where both end a row, as in `Policy.stopping`."""


def masked(tables: GrammarTables, residents: Mapping[int, Resident], slots: int) -> GrammarTables:
    """Tables with the masks of all rows that are stepped on the host.

    Args:
        residents: rows by slot.
        slots: of the engine.
    """
    masks = no_masks(slots, tables.token_class.shape[1])
    for slot, row in residents.items():
        if row.matcher is not None:
            masks[slot] = row.matcher.allowed
    return tables.replace(masks=masks)


def stepped(state: EngineState, residents: Mapping[int, Resident], mesh: ModelMesh | None) -> EngineState:
    """The state after a decode step, with the grammars on the host stepped and the rows ended that they end."""
    rows = [(slot, row, row.matcher) for slot, row in residents.items() if row.matcher is not None]
    if not rows:
        return state
    parts = state.rows.buffer, state.rows.length, state.rows.automaton, state.rows.active, state.stop, state.overrun
    buffer, length, automaton, active, stop, overrun = map(np.array, jax.device_get(parts))
    for slot, row, matcher in rows:
        prompt_len, total = row.group.request.prompt_tokens.size, int(length[slot])
        new = buffer[slot, prompt_len + matcher.read_len : total]
        matcher.read(new.tolist())
        if new.size and matcher.error:
            log.warning("prompt %r: the grammar's matcher gives up: %s", row.group.request.prompt_id, matcher.error)
        automaton[slot] = matcher.state
        if not new.size or not _ends(row, matcher.state, prompt_len, total):
            continue
        if total < prompt_len + row.sample.given.size:
            overrun[slot] = overrun[slot] or total
        elif stop[slot] not in _BEFORE_GRAMMARS:
            stop[slot], active[slot] = StopReason.GRAMMAR_DONE.code, False
    automaton, active, stop, overrun = placed(mesh, (automaton, active, stop, overrun))
    return state.replace(rows=state.rows.replace(automaton=automaton, active=active), stop=stop, overrun=overrun)


def _ends(row: Resident, matcher_state: int, prompt_len: int, total: int) -> bool:
    """Whether the grammar ends a row of so many tokens, as GrammarDone and `Policy.stop_codes` say it of tables."""
    params = row.group.params
    if matcher_state == FULL and params.grammar_end != "eos":
        return True
    held = total < params.min_length or total - prompt_len < params.min_new_tokens
    return params.grammar_end == "accepted" and matcher_state in (COMPLETE, FULL) and not held
