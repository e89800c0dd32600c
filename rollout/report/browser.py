"""The completions of a report as plain values for its page: text by tokens, numbers beside every token."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollout.report.pieces import spell, visible
from rollout.report.reading import Shown
from rollout.trajectory import Trajectory

MAX_TOKENS = 100_000
"""Tokens of completions in one page: some 5 MB."""
_SHORTEST = 64
"""Tokens of a completion that are shown in any case."""
_MAX_PROMPT_TOKENS = 2000
_MAX_METADATA = 4000
"""Characters of a prompt's metadata."""

Bytes = Callable[[int], bytes]


def longest_shown(lengths: Sequence[int], budget: int = MAX_TOKENS) -> int:
    """The largest number of tokens per completion with which completions of these lengths stay within the budget."""
    left = budget
    for index, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - index)
        if length > share:
            return max(share, _SHORTEST)
        left -= length
    return max(lengths, default=_SHORTEST)


def browse(groups: Sequence[Shown], bytes_of: Bytes, longest: int) -> list[dict[str, Any]]:
    """One object for each group: heading, prompt and samples. `longest` is of a completion, in tokens."""
    return [_group(shown, bytes_of, longest) for shown in groups]


def _group(shown: Shown, bytes_of: Bytes, longest: int) -> dict[str, Any]:
    first = shown.samples[0]
    prompt = first.prompt_tokens[-_MAX_PROMPT_TOKENS:]
    metadata = json.dumps(first.metadata, ensure_ascii=False, indent=1) if first.metadata else ""
    samples = zip(shown.samples, shown.captions, strict=True)
    return {
        "heading": shown.heading,
        "prompt_id": visible(first.prompt_id),
        "prompt": "".join(spell(prompt, bytes_of)),
        "prompt_len": first.prompt_tokens.size,
        "prompt_left_out": first.prompt_tokens.size - prompt.size,
        "metadata": visible(metadata[:_MAX_METADATA] + ("…" if len(metadata) > _MAX_METADATA else "")),
        "left_out": shown.left_out,
        "samples": [_sample(row, caption, bytes_of, longest) for row, caption in samples],
    }


def _sample(row: Trajectory, caption: str, bytes_of: Bytes, longest: int) -> dict[str, Any]:
    """A completion; of one that is too long, three quarters of what is shown come from its beginning."""
    places = np.arange(row.completion_len)
    left_out = max(row.completion_len - longest, 0)
    gap = longest * 3 // 4 if left_out else row.completion_len
    places = np.concatenate([places[:gap], places[gap + left_out :]])
    pieces = spell(row.completion_tokens, bytes_of, before=row.prompt_tokens[-4:].tolist())
    versions = row.policy_versions
    return {
        "caption": caption,
        "index": row.sample_index,
        "reward": row.reward,
        "problem": visible(row.failure or row.reward_error or ""),
        "stop": str(row.stop_reason),
        "length": row.completion_len,
        "given": row.given_len,
        "temperature": row.policy.get("temperature"),
        "versions": [int(versions.min()), int(versions.max())] if versions.size else [],
        "gap": gap,
        "left_out": left_out,
        "pieces": [pieces[place] for place in places],
        "ids": row.completion_tokens[places].tolist(),
        "behaviour": _numbers(row.behaviour_logprobs[places]),
        "model": _numbers(row.model_logprobs[places]),
        "kept": _numbers(np.exp(row.log_kept_mass[places])),
        "entropy": _numbers(row.entropy[places]),
        "runs": [[version, len([*run])] for version, run in itertools.groupby(versions[places].tolist())],
    }


def _numbers(values: np.ndarray) -> list[float | str | None]:
    """Numbers as JSON has them: null for NaN, "-Infinity" for what is infinitely unlikely."""
    return [
        round(value, 4)
        if math.isfinite(value)
        else None
        if math.isnan(value)
        else str(value).replace("inf", "Infinity")
        for value in values.tolist()
    ]
