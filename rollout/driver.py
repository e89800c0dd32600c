"""sample_run: the main job on one page. Prompts from the config, groups through the workers, files in the folder."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors import Chaos, Deadlines, Placement, RetryPolicy, TpuSlice, WorkerPool, WorkerSpec
from rollout.atomic import before_writes
from rollout.canary import Canary
from rollout.config import RunConfig, WorkersConfig
from rollout.groups import GroupSampler
from rollout.learning.train_config import TrainConfig
from rollout.progress import Progress, ProgressReporter
from rollout.prompts import Prompt
from rollout.reward_pool import reward_pool
from rollout.rewards import Reward, require_scorable, reward_from_config
from rollout.scoring.config import ScoreConfig
from rollout.sources import digest_prompts, read_prompts
from rollout.store import RunFolder
from rollout.summary import RunSummary
from rollout.tokenizer import Tokenizer
from sampling.checkpoints import inspect_checkpoint, load_tokenizer
from sampling.fingerprint import fingerprint_digest
from sampling.params import SamplingParams
from sampling.plugins import Plugins, load_plugins
from sampling.plugins.contract import require_contract


def sample_run(
    config: RunConfig,
    out_dir: str | Path,
    *,
    address: str | None = None,
    progress: ProgressReporter | None = None,
    chaos: Chaos | Sequence[str] = (),
) -> RunSummary:
    """Samples every prompt of the config into a folder, or continues what was begun there.

    Every (prompt id, sample index) ends exactly once on disk, in prompt order: as a completion, or as a failed
    trajectory that says why. The bytes of the samples do not depend on the workers or on interruptions.

    Args:
        out_dir: a new folder, or that of the same run: unfinished, it is continued; finished, nothing is done.
        address: of a running Ray cluster; None starts Ray on this machine.
        progress: where to show how far the run is.
        chaos: what is to go wrong on the way (docs/chaos.md); the rows do not depend on it.
    Raises:
        ConfigError, PromptError, CheckpointError: the input has to change; found before any worker is started.
        WorkerError: all workers were lost. What was finished is on disk, and a later start continues.
    """
    began = time.monotonic()
    progress = progress or ProgressReporter(quiet=True)
    chaos = Chaos.of(chaos)
    plugins = load_plugins(config.plugins)
    config = config.model_copy(update={"plugins": plugins.refs})  # with their versions, for the folder to keep
    with before_writes(chaos.before_write), RunFolder.open(out_dir, config) as folder:
        prompts_digest = digest_prompts(config.prompts)
        folder.require_same(prompts_digest=prompts_digest)
        if folder.finished:
            return RunSummary.from_folder(folder.path, already_finished=True)
        reward = reward_from_config(config.reward)
        checkpoint = inspect_checkpoint(config.model.checkpoint)
        require_contract(plugins, checkpoint.config.vocab_size)
        census = _count(read_prompts(config.prompts), config.sampling, checkpoint.tokenizer_len, reward, plugins)
        tokenizer = Tokenizer(load_tokenizer(checkpoint))
        progress.message(f"starting {config.workers.count} worker(s) with {checkpoint.name}")
        rewarding = reward_pool(reward, config.reward_timeout_s, config.reward_workers)
        with rewarding as rewards, worker_pool(config, address, chaos) as pool:
            loaded = time.monotonic()
            progress.message(f"ready after {loaded - began:.1f} s")
            progress.message(f"a worker holds {pool.description.memory}")
            numerics = pool.description.fingerprint
            folder.begin(
                weights_digest=pool.description.weights_digest,
                numerics={fingerprint_digest(numerics): numerics},
                prompts_digest=prompts_digest,
                prompts_total=census.prompts,
                rows_total=census.rows,
            )
            canary = Canary(config.verify.share, config.model.dtype) if config.verify.share else None
            sampler = GroupSampler(
                pool,
                tokenizer,
                config.sampling,
                seed=config.seed,
                rewards=rewards,
                run_id=folder.manifest.run_id,
                canary=canary,
            )
            done = frozenset(folder.done_prompt_ids)
            missing = (prompt for prompt in read_prompts(config.prompts) if prompt.id not in done)
            rows_done = folder.manifest.rows
            programs = 0.0

            def report() -> None:
                nonlocal programs
                stats = pool.stats()
                engines, of_each = stats.engines, stats.engines.programs_compiled / max(stats.workers, 1)
                if of_each > programs > 0:
                    progress.message("compiled once more, for policies with larger tables or another order")
                programs = max(programs, of_each)
                progress.update(Progress(rows_done, census.rows, engines.tokens, engines.slots_busy, pool.slots))

            for group in sampler.sample(missing, on_wait=report):
                folder.add_group(group)
                rows_done += len(group)
            report()
            folder.require_same(prompts_digest=digest_prompts(config.prompts))  # nobody edited the file meanwhile
            if canary:
                canary.write(folder.path)
            folder.finish()
            engines, sampled_s = pool.stats().engines, time.monotonic() - loaded
        return RunSummary.from_folder(
            folder.path,
            wall_s=time.monotonic() - began,
            tokens_per_s=engines.tokens / sampled_s,
            programs_compiled=engines.programs_compiled,
            canary=canary.report() if canary else None,
        )


@dataclass(frozen=True)
class _Census:
    """How many prompts a source holds, and samples of them."""

    prompts: int
    rows: int


def _count(
    prompts: Iterable[Prompt], params: SamplingParams, known_tokens: int, reward: Reward | None, plugins: Plugins
) -> _Census:
    """Reads the whole source once, so that a bad line costs seconds before the run and not hours into it."""
    params.require_tokens(known_tokens, "sampling")
    plugins.resolved(params)
    count = rows = 0
    for prompt in prompts:
        own = prompt.params(params)
        own.require_tokens(known_tokens, f"{prompt.place}: sampling")
        plugins.resolved(own, f"{prompt.place}: sampling")
        require_scorable(reward, prompt)
        count, rows = count + 1, rows + own.n
    return _Census(count, rows)


def placement_of(workers: WorkersConfig) -> Placement:
    """Where a config's workers run."""
    tpu_slice = TpuSlice(workers.tpu_slice.topology, workers.tpu_slice.version) if workers.tpu_slice else None
    return Placement(workers.count, workers.cpus, workers.gpus, int(workers.tpus), workers.threads, tpu_slice)


def worker_pool(
    config: RunConfig | ScoreConfig | TrainConfig, address: str | None, chaos: Chaos | None = None
) -> WorkerPool:
    """The workers that a config asks for."""
    workers = config.workers
    return WorkerPool(
        WorkerSpec(config.model.checkpoint, config.geometry, config.model.dtype, config.plugins),
        placement_of(workers),
        Deadlines(workers.start_deadline_s, workers.group_deadline_s, workers.heartbeat_s),
        RetryPolicy(workers.max_group_attempts, workers.max_worker_restarts),
        address=address,
        chaos=chaos,
    )
