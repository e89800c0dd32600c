"""What a decode step on a CPU spends its time on and XLA has no good code for."""

from sampling.native.attention import TAKES, attend, serves
from sampling.native.library import registered

__all__ = ["TAKES", "attend", "registered", "serves"]
