"""JSON numbers within bounds as nodes."""

from __future__ import annotations

from dataclasses import dataclass

from sampling.grammar.nodes import DIGIT, Both, Node, chars, either, literal, optional, repeated, sequence

MOST_DIGITS = 15
"""Decimal digits that every float64 tells apart, so that no reader rounds a number across a bound."""

FRACTION_DIGITS = 6
"""Digits after the point where a number has bounds; before it there are then at most 9."""

LARGEST_INTEGER = 10**MOST_DIGITS - 1
LARGEST_BOUNDED = 10 ** (MOST_DIGITS - FRACTION_DIGITS) - 1


@dataclass(frozen=True)
class Bounds:
    """Whole-numbered bounds; None is none. `above` and `below` exclude the bound itself."""

    least: int | None = None
    most: int | None = None
    above: bool = False
    below: bool = False

    @property
    def is_open(self) -> bool:
        """True if nothing bounds the number."""
        return self.least is None and self.most is None

    def mirrored(self) -> Bounds:
        """Bounds of the number's negative."""
        least = None if self.most is None else -self.most
        return Bounds(least, None if self.least is None else -self.least, self.below, self.above)


def integer(bounds: Bounds) -> Node:
    """Whole numbers without exponent, of at most MOST_DIGITS digits."""
    least = -LARGEST_INTEGER if bounds.least is None else bounds.least + bounds.above
    most = LARGEST_INTEGER if bounds.most is None else bounds.most - bounds.below
    options = [natural(max(least, 0), most)] if most >= max(least, 0) else []
    if least < 0:
        options.append(sequence(literal("-"), natural(max(1, -most), -least)))
    return either(*options) if least <= most else either()


def number(bounds: Bounds) -> Node:
    """Decimal numbers; without bounds with an exponent of up to two digits as well."""
    if bounds.is_open:
        whole = either(literal("0"), sequence(chars("123456789"), repeated(DIGIT, 0, MOST_DIGITS - 1)))
        fraction = optional(sequence(literal("."), repeated(DIGIT, 1, MOST_DIGITS)))
        exponent = optional(sequence(chars("eE"), optional(chars("+-")), repeated(DIGIT, 1, 2)))
        return sequence(optional(literal("-")), whole, fraction, exponent)
    options = []
    if bounds.most is None or bounds.most > 0 or (bounds.most == 0 and not bounds.below):
        options.append(_from_zero(bounds, above_zero=False))
    if bounds.least is None or bounds.least < 0:
        options.append(sequence(literal("-"), _from_zero(bounds.mirrored(), above_zero=True)))
    return either(*options)


def natural(least: int, most: int) -> Node:
    """Whole numbers from `least` to `most`, 0 <= least, without leading zeros; nothing if there are none."""
    options = []
    for size in range(len(str(least)), len(str(most)) + 1 if most >= least else 0):
        low = max(least, 10 ** (size - 1) if size > 1 else 0)
        options.append(_same_length(str(low), str(min(most, 10**size - 1))))
    return either(*options)


def _from_zero(bounds: Bounds, above_zero: bool) -> Node:
    """Numbers from 0 on, or only those above it, within bounds."""
    if bounds.least is None or bounds.least < 0:
        least, above = 0, above_zero
    else:
        least, above = bounds.least, bounds.above or (above_zero and bounds.least == 0)
    most = LARGEST_BOUNDED if bounds.most is None else bounds.most
    below = bounds.most is not None and bounds.below
    zeros = repeated(literal("0"), 1, FRACTION_DIGITS)
    some = Both(repeated(DIGIT, 1, FRACTION_DIGITS), zeros, excluded=True)
    whole = sequence(natural(least + above, most - below), optional(sequence(literal("."), zeros)))
    return either(whole, sequence(natural(least, most - 1), literal("."), some))


def _same_length(low: str, high: str) -> Node:
    """Numbers between two of as many digits."""
    if set(low) <= {"0"} and set(high) <= {"9"}:
        return repeated(DIGIT, len(low), len(low))
    first, last = int(low[0]), int(high[0])
    if first == last:
        return sequence(literal(low[0]), _same_length(low[1:], high[1:]))
    rest = len(low) - 1
    options = [
        sequence(literal(low[0]), _same_length(low[1:], "9" * rest)),
        sequence(literal(high[0]), _same_length("0" * rest, high[1:])),
    ]
    if last - first > 1:
        between = chars(ranges=[(ord("0") + first + 1, ord("0") + last - 1)])
        options.append(sequence(between, repeated(DIGIT, rest, rest)))
    return either(*options)
