"""Logits transforms, one family a file."""

from sampling.transforms.base import FILTER, LogitsTransform, Transform, apply
from sampling.transforms.filters import MinP, TopK, TopP
from sampling.transforms.temperature import Greedy, Temperature

__all__ = [
    "FILTER",
    "Greedy",
    "LogitsTransform",
    "MinP",
    "Temperature",
    "TopK",
    "TopP",
    "Transform",
    "apply",
]
