"""Capacity: how many places the per-row tables of a policy have. The only part of a policy that shapes programs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from sampling.params import SamplingParams
from sampling.plugins import Plugins


@dataclass(frozen=True)
class Capacity:
    """Declared sizes. A policy that needs more makes the engine grow to the next power of two, with one compile.

    Attributes:
        end_ids: end-of-sequence ids, and as many stop ids.
        biases: entries of logit_bias.
        sequences, sequence_len: entries of sequence_bias, and as many banned sequences; tokens of the longest.
        allowed: entries of allowed_token_ids.
        suppressed: entries of suppress_tokens, and as many of begin_suppress_tokens.
        stop_strings, stop_bytes: stop strings; UTF-8 bytes of the longest.
        orders: named orders that the programs hold.
        marker_len: tokens of a thinking marker.
        support: ids of one token's recorded support.
        grammars, grammar_states, grammar_cells: different grammars of all rows together; their states, and one; the
            entries of their tables (sampling.grammar.tables).
        token_masks: 1 where every slot has room for a mask over the ids, as a grammar stepped on the host needs; or 0.
        plugins: the transforms and rules from outside. What an engine is made with stays.
    """

    end_ids: int = 16
    biases: int = 32
    sequences: int = 32
    sequence_len: int = 8
    allowed: int = 64
    suppressed: int = 64
    stop_strings: int = 4
    stop_bytes: int = 32
    marker_len: int = 8
    orders: tuple[str, ...] = ("transformers",)
    support: int = 0
    grammars: int = 8
    grammar_states: int = 4096
    grammar_cells: int = 2**20
    token_masks: int = 0
    plugins: Plugins = field(default_factory=Plugins)

    @classmethod
    def needed(cls, params: SamplingParams) -> Capacity:
        """The exact sizes that a policy fills, tables of grammars aside: rows share those."""
        words = [word for word in params.bad_words if not isinstance(word, str)]
        sequences = [ids for ids, _ in params.sequence_bias]
        return cls(
            end_ids=max(len(params.end_token_ids), len(params.forced_eos)),
            biases=len(params.logit_bias),
            sequences=max(len(words), len(sequences)),
            sequence_len=max(map(len, [*words, *sequences]), default=0),
            allowed=len(params.allowed_token_ids),
            suppressed=max(len(params.suppress_tokens), len(params.begin_suppress_tokens)),
            stop_strings=len(params.stop),
            stop_bytes=max((len(text.encode()) for text in params.stop), default=0),
            marker_len=max(len(params.thinking_start), len(params.thinking_end)),
            orders=(params.order,),
            support=params.record_support,
            grammars=0,
            grammar_states=0,
            grammar_cells=0,
            token_masks=int(params.grammar is not None and params.grammar.stepped),
        )

    def grown_for(self, needed: Capacity) -> Capacity:
        """This capacity with every size that is too small raised to the power of two that suffices."""
        sizes = {}
        for size in dataclasses.fields(self):
            have, want = getattr(self, size.name), getattr(needed, size.name)
            if size.name == "orders":
                sizes["orders"] = have + tuple(order for order in want if order not in have)
            elif size.name == "plugins":
                sizes["plugins"] = have
            else:
                sizes[size.name] = have if want <= have else 1 << (want - 1).bit_length()
        return Capacity(**sizes)
