"""A training folder as `rollout train` leaves it, made up: a job that learns sums, and records that fit its curves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rollout.codec import write_parquet
from rollout.rewards import Score
from rollout.trajectory import Trajectory
from sampling.params import SamplingParams
from sampling.types import StopReason
from tests.rollout.records import trajectory

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;<!--\u2028\u202e"
"""Text that tries to become markup, code, or the order of a line."""

Encode = Callable[[str], Sequence[int]]


def write_training(
    path: Path,
    checkpoint: str,
    encode: Encode,
    *,
    steps: int = 12,
    evaluate_every: int = 4,
    groups: int = 6,
    n: int = 4,
) -> Path:
    """Writes config, metrics, trajectories and evaluations of a job that has finished `steps` steps."""
    rng = np.random.default_rng(0)
    (path / "trajectories").mkdir(parents=True)
    (path / "evaluations").mkdir()
    config = {"model": {"checkpoint": checkpoint}, "seed": 5, "steps": 2 * steps}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    lines = []
    for step in range(1, steps + 1):
        skill = 1 / (1 + np.exp(-8 * (step / steps - 0.45)))
        values = metrics(step, skill, rng)
        after = 0 if step == 1 else step + 1
        if after % evaluate_every == 0:
            rows = [
                row for item in range(groups) for row in sums(f"held-out-{item}", 1, skill, after, encode, greedy=True)
            ]
            write(path / "evaluations" / f"step-{after:06}.parquet", rows)
            accuracy = float(np.mean([row.reward or 0.0 for row in rows]))
            figures = {"accuracy": accuracy, "reward_mean": accuracy, "length_mean": 30 - 12 * skill}
            values |= {f"{'' if after else 'initial_'}eval_{name}": value for name, value in figures.items()}
        rows = [row for item in range(groups) for row in sums(f"sum-{step}-{item}", n, skill, step, encode)]
        write(path / "trajectories" / f"step-{step:06}.parquet", rows)
        lines.append(json.dumps(values))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


def metrics(step: int, skill: float, rng: np.random.Generator) -> dict[str, Any]:
    """One step's numbers, as the job writes them."""
    noise = rng.normal(0, 1, 16)
    generate_s, learn_s = 2.1 + 0.15 * noise[0], 3.4 + 0.1 * noise[1]
    tokens = int(2400 - 900 * skill + 60 * noise[2])
    return {
        "step": step,
        "reward_mean": float(np.clip(0.08 + 0.85 * skill + 0.04 * noise[3], 0, 1)),
        "reward_std": float(0.1 + 0.3 * skill * (1 - skill)),
        "loss": 0.02 * noise[4],
        "policy_lag_max": int(step > 2) + int(step % 5 == 0),
        "policy_lag_mean": 0.6 * (step > 2),
        "mismatch_p999": float(2e-5 * np.exp(0.2 * noise[5])),
        "mismatch_max": float(7e-5 * np.exp(0.4 * noise[6])),
        "kl": float(0.04 * skill + 0.002 * noise[7]),
        "entropy": float(1.3 - 0.9 * skill + 0.04 * noise[8]),
        "grad_norm": float(0.5 * np.exp(0.3 * noise[9])),
        "clip_fraction": float(abs(0.015 + 0.01 * noise[10])),
        "ess": float(0.95 - 0.04 * abs(noise[11])),
        "ratio_p01": float(0.86 - 0.02 * abs(noise[12])),
        "ratio_p50": 1.0,
        "ratio_p99": float(1.15 + 0.02 * abs(noise[13])),
        "zero_variance_share": float(np.clip(0.5 + 0.4 * abs(2 * skill - 1) + 0.03 * noise[14], 0, 1)),
        "length_mean": 30 - 12 * skill,
        "length_max": 64,
        "truncated_share": float(0.2 * (1 - skill)),
        "tokens": tokens,
        "tokens_per_s": tokens / generate_s,
        "generate_s": generate_s,
        "learn_s": learn_s,
        "step_s": generate_s + learn_s + 0.2,
        "occupancy": float(np.clip(0.9 + 0.03 * noise[15], 0, 1)),
    }


def sums(prompt_id: str, n: int, skill: float, step: int, encode: Encode, greedy: bool = False) -> list[Trajectory]:
    """A group of completions of one sum; with skill 1 nearly all of them are right."""
    a, b = (int(number) for number in np.random.default_rng([*prompt_id.encode()]).integers(11, 60, 2))
    rng = np.random.default_rng([step, *prompt_id.encode()])
    prompt = np.array(encode(f"What is {a} + {b}? Think, then give the number.\n"), np.int32)
    return [_sum(prompt_id, index, prompt, a, b, rng.random() < skill, step, encode, rng, greedy) for index in range(n)]


def _sum(
    prompt_id: str, index: int, prompt: np.ndarray, a: int, b: int, right: bool, step: int, encode: Encode,
    rng: np.random.Generator, greedy: bool,
) -> Trajectory:  # fmt: skip
    answer = a + b if right else a + b + int(rng.integers(1, 11))
    ways = (
        f"{a} plus {b} is {answer}.\n\n**{answer}**",
        f"Let me see… {a} + {b} = {answer} ✓",
        f"It is {answer}, je crois: {a}+{b}.",
    )
    text = ways[int(rng.integers(len(ways)))]
    tokens = np.array(encode(text), np.int32)
    size = tokens.size
    model = -rng.gamma(0.35, 1.3, size).astype(np.float32)
    kept = np.log(rng.uniform(0.9, 1, size)).astype(np.float32)
    return trajectory(
        prompt_id,
        index,
        prompt_tokens=prompt,
        completion_tokens=tokens,
        behaviour_logprobs=np.zeros(size, np.float32) if greedy else np.minimum(model - kept, 0),
        model_logprobs=model,
        log_kept_mass=kept,
        entropy=rng.gamma(0.5, 1.0, size).astype(np.float32),
        policy_versions=np.where(np.arange(size) < size // 2, max(step - 1, 0), step).astype(np.int32),
        params=SamplingParams(temperature=0.0 if greedy else 1.0),
        stop_reason=StopReason.EOS if right else StopReason.LENGTH,
        score=Score(float(right)),
        text=text,
        metadata={"answer": a + b},
    )


def write(file: Path, rows: Sequence[Trajectory]) -> None:
    """Writes one file of records."""
    with file.open("wb") as stream:
        write_parquet(stream, rows)
