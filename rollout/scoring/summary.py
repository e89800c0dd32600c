"""What a scoring tells about each scorer: how far its law is from the recorded one, and how much the data is worth."""

from __future__ import annotations

import dataclasses
import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rollout.scoring.config import Law, RatiosConfig
from rollout.scoring.ratios import KlEstimates, KlSums, QuantileSketch, effective_sample_size, token_log_ratios
from rollout.scoring.scored import Outcome, ScoredSequence
from rollout.trajectory import drawn_places

NO_LOGPROBS = "no recorded log-probs"
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
MAX_FAILURES = 4


@dataclass(frozen=True)
class RatioStatistics:
    """Importance ratios of the sequences that were scored and have recorded log-probs.

    Attributes:
        trajectories, tokens: how many those are.
        ess: effective sample size of the sequences' importance weights; ess_share: of `trajectories`.
        ess_clipped, ess_clipped_share: the same of the weights cut off at the cap.
        clipped_share: share of the sequences whose weight is cut off.
        ppo_clip_fraction: share of the tokens whose ratio is outside PPO's clip range.
        mean_abs_log_ratio: |log ratio| per token, over tokens in support, nats; None if there are none.
        abs_log_ratio_quantiles: "p50", "p90" and "p99" of the same, within 1 %, and "max", exact.
        kl: estimates of KL(recorded || scored) over tokens in support, nats per token. With any token out of support
            the divergence itself is infinite.
    """

    trajectories: int
    tokens: int
    ess: float
    ess_share: float
    ess_clipped: float
    ess_clipped_share: float
    clipped_share: float
    ppo_clip_fraction: float
    mean_abs_log_ratio: float | None
    abs_log_ratio_quantiles: dict[str, float | None]
    kl: KlEstimates | None


@dataclass(frozen=True)
class AgeStatistics:
    """Staleness: what was drawn `age` versions before the source's newest version.

    Attributes:
        age: versions.
        trajectories: sequences whose oldest token has this age.
        tokens: tokens of this age.
        ess: effective sample size of those sequences; None without recorded log-probs.
        mean_abs_log_ratio: of those tokens, where in support, nats; None without recorded log-probs.
    """

    age: int
    trajectories: int
    tokens: int
    ess: float | None
    mean_abs_log_ratio: float | None


@dataclass(frozen=True)
class ScorerSummary:
    """Figures of one scorer. Means are over tokens, in nats; shares are of what was scored.

    Tokens are drawn ones: those that were given or forced count nowhere.

    Attributes:
        name, checkpoint, path: of the scorer.
        weights_digest: of its weights; "" if nothing was scored.
        trajectories: sequences of the source: scored + skipped + failed.
        tokens: completion tokens scored.
        mean_model_logprob: None without tokens.
        mean_behaviour_logprob: over tokens in support; None without.
        mean_entropy: of the scorer's law; None without tokens.
        out_of_support_share: tokens that the scorer's policy has removed; None without tokens.
        zero_probability_share: sequences with such a token; None without sequences.
        ended_early_share: sequences that the scorer's stopping rules would have ended before their last token.
        ratios: None without recorded log-probs.
        staleness: by age; empty where the source tells no policy versions.
        failures: the first few, with where they are.
    """

    name: str
    checkpoint: str
    path: str
    weights_digest: str
    trajectories: int
    scored: int
    skipped: int
    failed: int
    tokens: int
    mean_model_logprob: float | None
    mean_behaviour_logprob: float | None
    mean_entropy: float | None
    out_of_support_share: float | None
    zero_probability_share: float | None
    ended_early_share: float | None
    ratios: RatioStatistics | None
    staleness: tuple[AgeStatistics, ...]
    failures: tuple[str, ...]


class _Age:
    """Sums of one age."""

    def __init__(self) -> None:
        self.trajectories = 0
        self.tokens = 0
        self.log_weights = array("d")
        self.log_ratios = QuantileSketch()


class Tally:
    """Counts a scorer's sequences one by one; keeps no more of each than its log-ratio."""

    def __init__(self, ratios: RatiosConfig, newest_version: int | None) -> None:
        self._config = ratios
        self._newest = newest_version
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._failures: list[str] = []
        self._digest = ""
        self._tokens = self._in_support = self._zero = self._ended = 0
        self._model = self._behaviour = self._entropy = 0.0
        self._log_weights = array("d")
        self._ratio_tokens = 0
        self._clipped_tokens = 0.0
        self._log_ratios = QuantileSketch()
        self._kl = KlSums()
        self._ages: dict[int, _Age] = {}

    def add(self, row: ScoredSequence) -> None:
        """Takes a sequence in."""
        self._outcomes[row.outcome] += 1
        if row.outcome is Outcome.FAILED and len(self._failures) < MAX_FAILURES:
            self._failures.append(f"prompt {row.prompt_id!r}, sample {row.sample_index}: {row.failure}")
        if row.outcome is not Outcome.SCORED:
            return
        drawn = drawn_places(row.completion_tokens.size, row.given_len, row.forced)
        kept = row.in_support[drawn]
        self._digest = row.weights_digest
        self._tokens += kept.size
        self._in_support += int(kept.sum())
        self._zero += not kept.all()
        self._ended += row.ended_at is not None
        self._model += float(row.model_logprobs[drawn].sum(dtype=np.float64))
        self._behaviour += float(row.behaviour_logprobs[drawn][kept].sum(dtype=np.float64))
        self._entropy += float(row.entropy[drawn].sum(dtype=np.float64))
        log_ratios = None
        if row.log_ratio is not None:
            assert row.recorded_logprobs is not None and row.ppo_clip_fraction is not None
            log_ratios = token_log_ratios(row.behaviour_logprobs[drawn], row.recorded_logprobs[drawn])
            self._log_weights.append(row.log_ratio)
            self._ratio_tokens += kept.size
            self._clipped_tokens += row.ppo_clip_fraction * kept.size
            self._log_ratios.add(np.abs(log_ratios[kept]))
            self._kl.add(log_ratios[kept])
        if row.staleness_max is not None:
            assert row.policy_versions is not None and self._newest is not None
            self._add_ages(self._newest - row.policy_versions[drawn], row, log_ratios)

    def _add_ages(self, ages: np.ndarray, row: ScoredSequence, log_ratios: np.ndarray | None) -> None:
        for age, count in zip(*np.unique(ages, return_counts=True), strict=True):
            part = self._ages.setdefault(int(age), _Age())
            part.tokens += int(count)
            if log_ratios is not None:
                part.log_ratios.add(np.abs(log_ratios[(ages == age) & np.isfinite(log_ratios)]))
        oldest = self._ages[row.staleness_max or 0]
        oldest.trajectories += 1
        if row.log_ratio is not None:
            oldest.log_weights.append(row.log_ratio)

    def summary(self, law: Law) -> ScorerSummary:
        """The figures so far."""
        scored, tokens = self._outcomes[Outcome.SCORED], self._tokens
        return ScorerSummary(
            name=law.name,
            checkpoint=law.checkpoint,
            path=str(law.path),
            weights_digest=self._digest,
            trajectories=sum(self._outcomes.values()),
            scored=scored,
            skipped=self._outcomes[Outcome.SKIPPED],
            failed=self._outcomes[Outcome.FAILED],
            tokens=tokens,
            mean_model_logprob=_mean(self._model, tokens),
            mean_behaviour_logprob=_mean(self._behaviour, self._in_support),
            mean_entropy=_mean(self._entropy, tokens),
            out_of_support_share=_mean(tokens - self._in_support, tokens),
            zero_probability_share=_mean(self._zero, scored),
            ended_early_share=_mean(self._ended, scored),
            ratios=self._ratios() if self._log_weights else None,
            staleness=tuple(self._age(age) for age in sorted(self._ages)),
            failures=tuple(self._failures),
        )

    def _ratios(self) -> RatioStatistics:
        weights, log_cap = np.array(self._log_weights), math.log(self._config.cap)
        clipped = np.minimum(weights, log_cap)
        ess, ess_clipped = effective_sample_size(weights), effective_sample_size(clipped)
        sketch = self._log_ratios
        return RatioStatistics(
            trajectories=weights.size,
            tokens=self._ratio_tokens,
            ess=ess,
            ess_share=ess / weights.size,
            ess_clipped=ess_clipped,
            ess_clipped_share=ess_clipped / weights.size,
            clipped_share=float((weights > log_cap).mean()),
            ppo_clip_fraction=self._clipped_tokens / self._ratio_tokens,
            mean_abs_log_ratio=sketch.mean,
            abs_log_ratio_quantiles={name: sketch.quantile(share) for name, share in _QUANTILES.items()}
            | {"max": sketch.max if sketch.count else None},
            kl=self._kl.estimates(),
        )

    def _age(self, age: int) -> AgeStatistics:
        part = self._ages[age]
        recorded = bool(self._log_weights)
        ess = effective_sample_size(np.array(part.log_weights)) if recorded else None
        return AgeStatistics(age, part.trajectories, part.tokens, ess, part.log_ratios.mean)


@dataclass(frozen=True)
class ScoreSummary:
    """What a finished scoring tells the person who started it.

    Attributes:
        source: what was scored.
        ratios: how importance ratios were cut.
        newest_version: largest policy version of the source, from which ages count; None if it tells none.
        scorers: one each, in the order of the config.
        files: what was written.
    """

    source: str
    ratios: RatiosConfig
    newest_version: int | None
    scorers: tuple[ScorerSummary, ...]
    files: tuple[Path, ...]

    @property
    def failed(self) -> int:
        """Sequences that could not be scored, over all scorers."""
        return sum(scorer.failed for scorer in self.scorers)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "source": self.source,
            "ratios": self.ratios.model_dump(),
            "newest_version": self.newest_version,
            "scorers": [dataclasses.asdict(scorer) for scorer in self.scorers],
        }

    def render(self, console: Console) -> None:
        """Prints one column per scorer, then its ages, then the files."""
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("", no_wrap=True)
        for scorer in self.scorers:
            table.add_column(scorer.name, justify="right")
        columns = [_figures(scorer, self.ratios) for scorer in self.scorers]
        for name in columns[0]:
            table.add_row(name, *(column[name] for column in columns))
        console.print(table, highlight=False)
        for scorer in self.scorers:
            if len(scorer.staleness) > 1:
                console.print()
                console.print(_ages(scorer), highlight=False)
        for path in self.files:
            console.print(f"  {path}", markup=False, highlight=False, soft_wrap=True)


def _figures(scorer: ScorerSummary, config: RatiosConfig) -> dict[str, str]:
    """The figures of one scorer, in words, by what they are; nats are per token."""
    figures = {
        "trajectories": f"{scorer.trajectories:,}",
        "  skipped": f"{scorer.skipped:,}",
        "  failed": f"{scorer.failed:,}",
        "  impossible": _share(scorer.zero_probability_share),
        "  ended early": _share(scorer.ended_early_share),
        "tokens": f"{scorer.tokens:,}",
        "  out of support": _share(scorer.out_of_support_share),
        "mean model log-prob": _nats(scorer.mean_model_logprob),
        "mean behaviour log-prob": _nats(scorer.mean_behaviour_logprob),
        "mean entropy": _nats(scorer.mean_entropy),
    }
    low, high = 1 - config.clip_epsilon, 1 + config.clip_epsilon
    compared = {
        "effective sample size": lambda r: f"{r.ess:,.1f}",
        "  share": lambda r: _share(r.ess_share),
        f"  weights cut at {config.cap:g}": lambda r: f"{r.ess_clipped:,.1f}",
        "  share, cut": lambda r: _share(r.ess_clipped_share),
        "weights cut": lambda r: _share(r.clipped_share),
        f"ratios outside {low:g} .. {high:g}": lambda r: _share(r.ppo_clip_fraction),
        "mean |log ratio|": lambda r: _nats(r.mean_abs_log_ratio),
        **{f"  {name}": lambda r, name=name: _nats(r.abs_log_ratio_quantiles[name]) for name in (*_QUANTILES, "max")},
        **{f"KL {name}": lambda r, name=name: _nats(r.kl and getattr(r.kl, name)) for name in ("k1", "k2", "k3")},
    }
    ratios = scorer.ratios
    figures["compared"] = f"{ratios.trajectories:,}" if ratios else NO_LOGPROBS
    return figures | {name: words(ratios) if ratios else "-" for name, words in compared.items()}


def _ages(scorer: ScorerSummary) -> Table:
    table = Table(title=f"staleness, {scorer.name}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("versions behind", "trajectories", "tokens", "effective sample size", "mean |log ratio|"):
        table.add_column(name, justify="right")
    for age in scorer.staleness:
        ess = NO_LOGPROBS if age.ess is None else f"{age.ess:,.1f}"
        table.add_row(str(age.age), f"{age.trajectories:,}", f"{age.tokens:,}", ess, _nats(age.mean_abs_log_ratio))
    return table


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _nats(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"
