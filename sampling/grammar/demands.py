"""What a policy demands besides its grammar, and whether both can hold: found out before anything is drawn."""

from __future__ import annotations

import functools

import numpy as np

from sampling.errors import ConfigError
from sampling.grammar.byte_automaton import NO_STATE, ByteAutomaton
from sampling.grammar.stepped import Followed
from sampling.grammar.token_automaton import TokenAutomaton
from sampling.param_checks import short
from sampling.params import SamplingParams


def refuse_contradictions(params: SamplingParams, automaton: Followed, prompt_len: int, where: str) -> None:
    """Refuses parameters under which no completion could be whole, or that could never matter.

    Args:
        params: as `resolved` leaves them, with a grammar.
        automaton: of the grammar.
        prompt_len: tokens of the prompt, which some lengths count.
        where: begins the message.
    Raises:
        ConfigError: two parameters contradict; the message names both.
    """
    grammar = params.grammar
    assert grammar is not None

    def refuse(name: str, why: str) -> None:
        raise ConfigError(
            f"{where}.{name} = {short(getattr(params, name))} contradicts {where}.{grammar.kind} ="
            f" {short(grammar.source)}: {why}"
        )

    waits = params.grammar_end == "eos"
    if waits and not params.eos_token_ids:
        refuse("grammar_end", "the row waits for an end-of-sequence id, and there is none")
    if not isinstance(automaton, TokenAutomaton):
        return  # a matcher knows nothing of texts but what may follow
    shortest, longest = automaton.shortest + waits, automaton.longest
    if shortest > params.max_new_tokens:
        refuse("max_new_tokens", f"its shortest text takes {shortest} tokens")
    if params.max_length is not None and prompt_len + shortest > params.max_length:
        refuse("max_length", f"its shortest text takes {shortest} tokens after {prompt_len} of the prompt")
    if longest is not None and longest < params.min_new_tokens:
        refuse("min_new_tokens", f"its longest text takes {longest} tokens")
    if longest is not None and prompt_len + longest < params.min_length:
        refuse("min_length", f"its longest text takes {longest} tokens after {prompt_len} of the prompt")
    for text in params.stop:
        if not occurs(automaton.text, text.encode()):
            refuse("stop", f"{short(text)} can occur in none of its texts")
        if always_occurs(automaton.text, text.encode()):
            refuse("stop", f"{short(text)} occurs in all of its texts, so none would be whole before it")


@functools.lru_cache(maxsize=256)
def occurs(language: ByteAutomaton, text: bytes) -> bool:
    """Whether a text occurs, or ends, in some text of a language; it may begin before that one."""
    return _search(language, text, range(len(text)), np.zeros(language.num_states, bool))[1]


@functools.lru_cache(maxsize=256)
def always_occurs(language: ByteAutomaton, text: bytes) -> bool:
    """Whether a text occurs in every text of a language."""
    return not _search(language, text, range(1), language.accepting)[0]


def _search(language: ByteAutomaton, text: bytes, begun: range, ends: np.ndarray) -> tuple[bool, bool]:
    """Reads all texts of a language at once, while looking for one.

    Args:
        begun: how many bytes of it may have been seen before.
        ends: bool [states].
    Returns:
        Whether one of the states in `ends` is reached without finding the text, and whether the text is found.
    """
    after_byte = {byte: _seen_after(text, byte) for byte in set(text)}
    rest = [byte for byte in range(256) if byte not in after_byte]  # after which nothing of the text has been seen
    _, firsts = np.unique(language.byte_class[rest], return_index=True)
    after_byte |= {rest[first]: np.zeros(len(text), int) for first in firsts}
    reached = np.zeros((language.num_states, len(text)), bool)
    reached[0, list(begun)] = True
    state, seen = np.nonzero(reached)
    found = False
    while state.size:
        following, matched = [], []
        for byte, after in after_byte.items():
            following.append(language.next_state[state, language.byte_class[byte]])
            matched.append(after[seen])
        state, seen = np.concatenate(following), np.concatenate(matched)
        inside = state != NO_STATE
        state, seen = state[inside], seen[inside]
        found = found or bool((seen == len(text)).any())
        part = seen < len(text)
        state, seen = state[part], seen[part]
        new = ~reached[state, seen]
        pairs = np.unique(np.stack([state[new], seen[new]], axis=1), axis=0)
        state, seen = pairs[:, 0], pairs[:, 1]
        reached[state, seen] = True
    return bool((reached.any(axis=1) & ends).any()), found


def _seen_after(text: bytes, byte: int) -> np.ndarray:
    """How many bytes of a text have been seen after one more byte, by how many before; int [text]."""
    read = [text[:seen] + bytes([byte]) for seen in range(len(text))]
    return np.array([next(size for size in range(len(r), -1, -1) if r.endswith(text[:size])) for r in read])
