"""Logits transforms, one family a file."""

from sampling.transforms.base import FILTER, LogitsTransform, Transform, apply, apply_all, neutral_rows
from sampling.transforms.biases import LogitBias, SequenceBias, bad_words, sequence_bias
from sampling.transforms.entropy_filters import EpsilonCutoff, EtaCutoff, TopH, Typical
from sampling.transforms.filters import MinP, TopK, TopP
from sampling.transforms.grammar import GrammarMask
from sampling.transforms.lengths import ExponentialDecayLengthPenalty, ForcedBOS, ForcedEOS, MinLength, MinNewTokens
from sampling.transforms.masks import AllowedTokens, BeginSuppressTokens, SuppressTokens
from sampling.transforms.ngrams import NoRepeatNGram, PromptNoRepeatNGram
from sampling.transforms.penalties import (
    FrequencyPenalty,
    PresencePenalty,
    PromptRepetitionPenalty,
    RepetitionPenalty,
)
from sampling.transforms.sanitising import RemoveInvalidValues, Renormalize
from sampling.transforms.temperature import Greedy, Temperature
from sampling.transforms.thinking import ThinkingBudget

__all__ = [
    "FILTER",
    "AllowedTokens",
    "BeginSuppressTokens",
    "EpsilonCutoff",
    "EtaCutoff",
    "ExponentialDecayLengthPenalty",
    "ForcedBOS",
    "ForcedEOS",
    "FrequencyPenalty",
    "GrammarMask",
    "Greedy",
    "LogitBias",
    "LogitsTransform",
    "MinLength",
    "MinNewTokens",
    "MinP",
    "NoRepeatNGram",
    "PresencePenalty",
    "PromptNoRepeatNGram",
    "PromptRepetitionPenalty",
    "RemoveInvalidValues",
    "Renormalize",
    "RepetitionPenalty",
    "SequenceBias",
    "SuppressTokens",
    "Temperature",
    "ThinkingBudget",
    "TopH",
    "TopK",
    "TopP",
    "Transform",
    "Typical",
    "apply",
    "apply_all",
    "bad_words",
    "neutral_rows",
    "sequence_bias",
]
