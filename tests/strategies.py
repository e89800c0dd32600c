"""Hypothesis strategies shared by the tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from rollout.trajectory import FAILED_REASONS, Status, Trajectory
from sampling.params import SamplingParams
from sampling.types import StopReason

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
token_ids = st.integers(0, 2**31 - 1)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
metadata = st.dictionaries(texts, json_values, max_size=3)

float32_bits = st.integers(0, 2**32 - 1)
"""Any float32 by its bits: every NaN payload, both zeros, subnormals and infinities."""

drawn_logprobs = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False, width=32)
entropies = st.floats(0, 20, width=32) | st.sampled_from([np.nan])
any_logprobs = drawn_logprobs | st.sampled_from([-np.inf, np.nan, -0.0])


def float32_arrays(elements: st.SearchStrategy[float], size: int) -> st.SearchStrategy[np.ndarray]:
    """float32 [size]."""
    return st.lists(elements, min_size=size, max_size=size).map(lambda values: np.array(values, np.float32))


def int32_arrays(min_size: int, max_size: int) -> st.SearchStrategy[np.ndarray]:
    """int32 [min_size .. max_size]."""
    return st.lists(token_ids, min_size=min_size, max_size=max_size).map(lambda values: np.array(values, np.int32))


sampling_params = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(1e-6, 4),
    top_k=st.none() | st.integers(1, 100),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    max_new_tokens=st.integers(1, 64),
    eos_token_ids=st.lists(token_ids, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    n=st.integers(1, 8),
    seed=st.none() | st.integers(0, 2**64 - 1),
)


@st.composite
def support_of(draw: st.DrawFn, token: np.int32) -> np.ndarray:
    """A recorded support that holds the token, or an empty one."""
    others = draw(st.none() | st.sets(token_ids, max_size=4))
    return np.zeros(0, np.int32) if others is None else np.array(sorted({int(token), *others}), np.int32)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """A valid record, completed or failed, empty completions included."""
    tokens = draw(int32_arrays(0, 5))
    supports = [draw(support_of(token)) for token in tokens]
    stop_reason = draw(st.sampled_from(StopReason))
    failed = stop_reason in FAILED_REASONS
    reward = draw(st.none() | st.floats(allow_nan=False, allow_infinity=False))
    return Trajectory(
        run_id=draw(texts),
        prompt_id=draw(ids),
        group_id=draw(texts),
        sample_index=draw(st.integers(0, 1000)),
        prompt_tokens=draw(int32_arrays(0, 5)),
        completion_tokens=tokens,
        given_len=draw(st.integers(0, tokens.size)),
        behaviour_logprobs=draw(float32_arrays(drawn_logprobs, tokens.size)),
        model_logprobs=draw(float32_arrays(any_logprobs, tokens.size)),
        log_kept_mass=draw(float32_arrays(any_logprobs, tokens.size)),
        entropy=draw(float32_arrays(entropies, tokens.size)),
        policy_versions=draw(int32_arrays(tokens.size, tokens.size)),
        support_sizes=np.array([ids.size for ids in supports], np.int32),
        support_ids=np.concatenate([np.zeros(0, np.int32), *supports]),
        policy=draw(sampling_params).to_dict(),
        key=np.array(draw(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=2)), np.uint32),
        stop_reason=stop_reason,
        status=Status.FAILED if failed else Status.COMPLETED,
        failure=draw(texts.filter(bool)) if failed else None,
        reward=reward,
        reward_error=draw(st.none() | texts.filter(bool)) if reward is None else None,
        weights_digest=draw(texts),
        numerics_fingerprint=draw(texts),
        wait_s=draw(st.floats(0, 1e6)),
        decode_s=draw(st.floats(0, 1e6)),
        worker=draw(texts),
        text=draw(texts),
        metadata=draw(metadata),
        forced=np.array(sorted(draw(st.sets(st.integers(0, tokens.size - 1)))) if tokens.size else [], np.int32),
    )
