"""Tests actors/spec.py: a value of another kind is refused where it is given, not by a worker later."""

import math

import pytest

from actors import Deadlines, Placement, RetryPolicy, WorkerSpec
from sampling.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (Placement, {"num_workers": 0}, "placement.num_workers: expected a whole number of at least 1, got 0"),
        (Placement, {"num_workers": 2.0}, "placement.num_workers: expected a whole number of at least 1, got 2.0"),
        (Placement, {"threads": True}, "placement.threads: expected a whole number of at least 1, got True"),
        (Placement, {"cpus": math.inf}, "placement.cpus: expected a finite number >= 0, got inf"),
        (Placement, {"cpus": math.nan}, "placement.cpus: expected a finite number >= 0, got nan"),
        (Placement, {"gpus": -0.5}, "placement.gpus: expected a finite number >= 0, got -0.5"),
        (Placement, {"gpus": "1"}, "placement.gpus: expected a finite number >= 0, got '1'"),
        (Placement, {"tpus": 0.5}, "placement.tpus: expected a whole number of at least 0, got 0.5"),
        (Placement, {"gpus": 1, "tpus": 1}, "placement: expected GPUs or TPUs"),
        (Deadlines, {"start_s": 0}, "deadlines.start_s: expected seconds above 0, got 0"),
        (Deadlines, {"group_s": math.inf}, "deadlines.group_s: expected seconds above 0, got inf"),
        (Deadlines, {"heartbeat_s": None}, "deadlines.heartbeat_s: expected seconds above 0, got None"),
        (RetryPolicy, {"max_group_attempts": 0}, "retry.max_group_attempts: expected a whole number of at least 1"),
        (RetryPolicy, {"max_worker_restarts": 1.5}, "retry.max_worker_restarts: expected a whole number of at least 0"),
        (RetryPolicy, {"backoff_s": math.nan}, "retry.backoff_s: expected seconds of at least 0, got nan"),
        (WorkerSpec, {"checkpoint": None}, "checkpoint: expected text, got None"),
        (WorkerSpec, {"checkpoint": "x", "geometry": 4}, r"geometry: expected Geometry\(...\), got 4"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(make, values, message):
    with pytest.raises(ConfigError, match=message):
        make(**values)
