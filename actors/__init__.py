"""Where sampling runs: workers on Ray and the pool that keeps them busy. The only Ray in the tree, and no maths."""

from actors.chaos import Chaos, Fault
from actors.messages import GroupFailure, GroupResult, Outcome, Publication, WorkerDescription
from actors.pool import WorkerPool
from actors.spec import Deadlines, Placement, RetryPolicy, TpuSlice, WorkerSpec

__all__ = [
    "Chaos",
    "Deadlines",
    "Fault",
    "GroupFailure",
    "GroupResult",
    "Outcome",
    "Placement",
    "Publication",
    "RetryPolicy",
    "TpuSlice",
    "WorkerDescription",
    "WorkerPool",
    "WorkerSpec",
]
