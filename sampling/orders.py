"""The named orders in which the stages of a policy apply."""

from __future__ import annotations

from sampling.param_checks import ORDERS

STAGES = {
    "transformers": (
        "sequence_bias logit_bias prompt_repetition_penalty repetition_penalty frequency_penalty presence_penalty"
        " no_repeat_ngram_size prompt_no_repeat_ngram_size bad_words min_length min_new_tokens forced_bos forced_eos"
        " remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"
        " allowed_token_ids thinking_budget grammar temperature top_h top_k top_p min_p typical_p epsilon_cutoff"
        " eta_cutoff renormalize greedy"
    ).split(),
    "reference": (
        "remove_invalid_values allowed_token_ids suppress_tokens begin_suppress_tokens min_length min_new_tokens"
        " grammar forced_bos forced_eos bad_words no_repeat_ngram_size prompt_no_repeat_ngram_size sequence_bias"
        " logit_bias prompt_repetition_penalty repetition_penalty frequency_penalty presence_penalty"
        " exponential_decay_length_penalty thinking_budget temperature top_k top_p min_p top_h typical_p epsilon_cutoff"
        " eta_cutoff renormalize greedy"
    ).split(),
    "vllm": (
        "remove_invalid_values grammar allowed_token_ids bad_words min_length min_new_tokens logit_bias"
        " sequence_bias prompt_repetition_penalty repetition_penalty frequency_penalty presence_penalty"
        " no_repeat_ngram_size prompt_no_repeat_ngram_size forced_bos forced_eos exponential_decay_length_penalty"
        " suppress_tokens begin_suppress_tokens thinking_budget temperature min_p top_k top_p top_h typical_p"
        " epsilon_cutoff eta_cutoff renormalize greedy"
    ).split(),
}
"""The stages of each order, first to last, named by the parameter that they come from.

`transformers` is the order of its `generate`; what that does not have stands beside its nearest kin. `vllm` is the
order of its V1 sampler. Each list names the same stages: a test checks.
"""

ORDER_NAMES = tuple(ORDERS)
"""The orders by their numbers in a policy."""
