"""Policy: a chain of transforms and stopping rules as a pytree, one for a row or stacked over the rows of a batch.

`lower` is the only way from SamplingParams to a Policy. Every policy of one order has the same structure, with
neutral values where a stage is off, so that stacking is free and changing any number compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sampling.errors import ConfigError
from sampling.params import SamplingParams
from sampling.state import NO_TOKEN, StepState
from sampling.stopping import EndOfSequence, MaxNewTokens, Stopping
from sampling.transforms import Greedy, LogitsTransform, MinP, Temperature, TopK, TopP, apply
from sampling.types import StopReason

EOS_CAPACITY = 16
"""End-of-sequence ids that a row can have."""


class Policy(struct.PyTreeNode):
    """How rows are drawn and when they end. Leaves are scalars for one row, or [rows] for a batch.

    Attributes:
        transforms: the stages, in the order in which they apply.
        stopping: the rules, the most telling first: where several end a row at once, the first gives the reason.
    """

    transforms: tuple[LogitsTransform, ...]
    stopping: tuple[Stopping, ...]

    def scores(self, state: StepState, logits: jax.Array) -> jax.Array:
        """The scores that the draw reads: float32 [rows, vocab], a removed token at -inf."""
        for transform in self.transforms:
            logits = apply(transform, state, logits)
        return logits

    def stop_codes(self, state: StepState, tokens: jax.Array) -> jax.Array:
        """int32 [rows]: why each row ends with the token just committed, as StopReason.code; 0 if it goes on."""
        code = jnp.zeros(tokens.shape, jnp.int32)
        for rule in self.stopping:
            reason = getattr(rule, "reason", StopReason.STOP_TOKEN)
            code = jnp.where((code == 0) & rule(state, tokens), reason.code, code)
        return code


def lower(params: SamplingParams, eos_token_ids: Sequence[int] = ()) -> Policy:
    """The policy of one row, with NumPy leaves.

    Args:
        params: what the user asked for.
        eos_token_ids: end-of-sequence ids of the checkpoint, which join the request's own.
    Raises:
        ConfigError: more end-of-sequence ids than EOS_CAPACITY.
    """
    greedy = params.temperature == 0
    # Stages that keep the best token cannot matter to a greedy row, so they are neutral in it.
    top_k, top_p, min_p = (0, 1.0, 0.0) if greedy else (params.top_k or 0, params.top_p, params.min_p)
    eos = () if params.ignore_eos else sorted({*eos_token_ids, *params.eos_token_ids})
    if len(eos) > EOS_CAPACITY:
        raise ConfigError(f"sampling.eos_token_ids: at most {EOS_CAPACITY} in all, got {len(eos)}: {eos}")
    return Policy(
        transforms=(
            Temperature(np.float32(1.0 if greedy else params.temperature)),
            TopK(np.int32(min(top_k, np.iinfo(np.int32).max))),
            TopP(np.float32(top_p)),
            MinP(np.float32(min_p)),
            Greedy(np.bool_(greedy)),
        ),
        stopping=(
            EndOfSequence(np.array([*eos, *[NO_TOKEN] * (EOS_CAPACITY - len(eos))], np.int32)),
            MaxNewTokens(np.int32(min(params.max_new_tokens, np.iinfo(np.int32).max))),
        ),
    )


def stack(policies: Sequence[Policy]) -> Policy:
    """Policies of one order as one policy with a [rows] axis on every leaf.

    Raises:
        ConfigError: the policies do not have the same stages.
    """
    structures = {jax.tree.structure(policy) for policy in policies}
    if len(structures) != 1:
        raise ConfigError("expected policies with the same stages in the same order, got different chains")
    return jax.tree.map(lambda *leaves: np.stack(leaves), *policies)


def resolved(params: SamplingParams, eos_token_ids: Sequence[int]) -> SamplingParams:
    """The parameters as they take effect: the checkpoint's end-of-sequence ids joined in. For records."""
    eos = () if params.ignore_eos else (*eos_token_ids, *params.eos_token_ids)
    return params.replace(eos_token_ids=tuple(int(i) for i in eos))
