"""Engine: a fixed set of slots that decode together, refilled as rows end.

Requests wait in a queue; a prompt is prefilled once and its samples are copied into free slots; all slots decode in
one compiled loop that comes back when the host has something to do. Which slot, beside whom and when changes no bit
of a row.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sampling.capacity import Capacity
from sampling.checkpoints import Checkpoint
from sampling.decode import next_logits
from sampling.engine_stats import EngineStats
from sampling.errors import ConfigError, RunError
from sampling.fingerprint import numerics_fingerprint
from sampling.grammar import Followed
from sampling.grammar.shelf import GrammarShelf
from sampling.grammar.tables import GrammarTables
from sampling.host_rows import masked, stepped
from sampling.intake import Intake, require_positions
from sampling.memory_plan import available_bytes, require_memory
from sampling.models import ModelMesh, Transformer
from sampling.models.mesh import made, placed
from sampling.open_group import OpenGroup, Resident
from sampling.params import SamplingParams
from sampling.plugins import PluginRefs
from sampling.plugins.contract import checked_plugins
from sampling.policy import Policy, lower
from sampling.programs import Programs, compile_programs, empty_state, is_lost, rearranged
from sampling.scoring import KnownSequence, Scorer
from sampling.staging import Staging
from sampling.types import Geometry, Group, Request
from sampling.vocabulary import Vocabulary
from sampling.waiting import WaitingLine
from sampling.weights import StagedWeights, WeightForm, require_version
from sampling.widths import compiler_options, decode_widths

log = logging.getLogger(__name__)

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

DECODE_STEPS = 16
"""Decode steps of one call at most, so that the host can report and admit; no result depends on it."""


class Engine:
    """Samples completions of requests with one set of weights.

    Compiles its programs when it is made and none afterwards, whatever the prompts, policies or budgets. Only a policy
    that needs larger tables than the capacity declares, or another order, makes it compile once more; it says so. The
    first request to be scored by forward passes compiles the program for that.

    Args:
        checkpoint: weights and what is known of them.
        geometry: the fixed shapes.
        dtype: "float32" or "bfloat16", of the model's matrix products.
        capacity: sizes of the policies' tables.
        devices: of JAX, among which the model is cut; the first one by default.
        plugins: transforms and rules from outside that requests may name, as PluginRefs.of takes them.
    Raises:
        ConfigError: an unknown dtype, a cache longer than the model's positions, more memory than there is, a number of
            devices into which the model cannot be cut, or a plugin that cannot be used.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        geometry: Geometry | None = None,
        dtype: str = "float32",
        capacity: Capacity | None = None,
        devices: Sequence[Any] | None = None,
        plugins: PluginRefs | Mapping[str, Any] | None = None,
    ) -> None:
        geometry = geometry or Geometry()
        info = checkpoint.info
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        require_positions(info, geometry.cache_len)
        devices = devices or jax.local_devices()[:1]
        mesh = ModelMesh.of(info.config, devices)
        self.memory_plan = require_memory(info.config, geometry, DTYPES[dtype], available_bytes(), mesh)
        log.info("memory of the engine: %s", self.memory_plan)
        self.geometry = geometry
        self.info = info
        self.policy_version = 0
        self.fingerprint = numerics_fingerprint(geometry, dtype, len(devices))
        self.plugins = checked_plugins(PluginRefs.of(plugins), info.config.vocab_size, decode_widths(geometry.slots))
        self._capacity = dataclasses.replace(capacity or Capacity(), plugins=self.plugins)
        self._model = Transformer(info.config, dtype=DTYPES[dtype], mesh=mesh)
        self._form = WeightForm.of(checkpoint.params, self._model, info.tokenizer_len)
        self._params = self._form.on_device(checkpoint.params)
        self._intake = Intake(info, geometry.cache_len, self.plugins)
        self.vocabulary = self._intake.vocabulary()
        self._vocabulary = placed(mesh, self.vocabulary or Vocabulary.from_pieces([b"?"]))
        self._grammars = GrammarShelf(info.config.vocab_size, self._capacity, mesh)
        empty = partial(made, mesh, partial(empty_state, self._model, geometry, self._capacity))
        self._resident: dict[int, Resident] = {}
        programs = self._compiled(self._capacity)
        self._programs = programs.checked(empty, self._params, self._vocabulary, self._tables())
        self._state = empty()
        self._staging = Staging(self._model, geometry)
        self._waiting = WaitingLine()
        self._scorer: Scorer | None = None
        self._finished: list[Group] = []
        self._free = list(range(geometry.slots))[::-1]
        counts = "groups completions tokens steps row_steps busy_row_steps prefill_tokens scored_tokens"
        self._counts = dict.fromkeys(counts.split(), 0)

    def submit(self, request: Request) -> None:
        """Lets a request wait for its turn; see `WaitingLine`.

        Raises:
            PromptError: the prompt leaves no room in the cache, or holds an id that is no token.
            ConfigError: a parameter names an id that is no token, or a text where there is no tokenizer; or a grammar
                cannot be used, or contradicts another parameter.
        """
        params = self._intake.resolved(request)
        capacity = self._capacity.grown_for(Capacity.needed(params))
        automaton = self.automaton(params)
        larger = self._grammars.take(params.grammar, automaton, capacity)
        if larger or capacity != self._capacity:
            self._grow(larger or capacity)
        group = OpenGroup.of(request, params, self.geometry.cache_len, automaton)
        if request.forward:
            self._score_later(group)
        else:
            self._waiting.append(group)

    def generate(self, requests: Iterable[Request]) -> Iterator[Group]:
        """Submits requests and yields their groups as they finish, in no particular order.

        If it ends early, because something raises or the caller takes no more groups, the rest is withdrawn: `abort`.
        """
        try:
            for request in requests:
                self.submit(request)
            while not self.idle:
                yield from self.step()
        except BaseException:
            self.abort()
            raise

    def step(self) -> list[Group]:
        """Admits what fits, decodes and scores for a while, and returns the groups that finished.

        An exception amid that, such as KeyboardInterrupt, withdraws every request: `abort`.
        """
        try:
            return self._advance()
        except BaseException:
            self.abort()
            raise

    def _advance(self) -> list[Group]:
        finished, self._finished = self._finished, []
        if self._scorer and not self._scorer.idle:
            finished += self._score()
        while self._free and (self._staging or self._waiting):
            if ready := self._staging.ready():
                self._admit(*ready)
            else:
                self._prefill()
        if self._resident:
            self._decode()
        return finished + self._collect()

    def abort(self) -> None:
        """Withdraws every request that waits or runs. Nothing of them is returned, and nothing stays behind."""
        for line in (self._waiting, self._resident, self._finished):
            line.clear()
        self._grammars.release_all()
        self._staging.abort()
        if self._scorer:
            self._scorer.abort()
        self._free = list(range(self.geometry.slots))[::-1]
        if is_lost(self._state):
            self._state = made(self._model.mesh, partial(empty_state, self._model, self.geometry, self._capacity))
        nobody = placed(self._model.mesh, np.zeros(self.geometry.slots, bool))
        self._state = self._state.replace(rows=self._state.rows.replace(active=nobody))

    def stage_weights(self, params: Mapping[str, Any]) -> StagedWeights:
        """See `WeightForm.staged`. Any thread may call it while the engine runs."""
        return self._form.staged(params)

    def load_weights(self, weights: StagedWeights | Mapping[str, Any], version: int) -> Any:
        """Draws every further token with other weights, compiling nothing. An error leaves the old ones in use.

        Rows in slots keep their cache and go on; each token records its version. Prompts with samples still to admit
        are read again, as are sequences being scored. Hence a completion of one version has an undisturbed one's bits.

        Args:
            weights: of `stage_weights`, or what that takes: a nested dict of arrays.
            version: names them in the records, 0 .. 2^31 - 1.
        Returns:
            The old arrays, which are freed when nobody holds them.
        Raises:
            CheckpointError, ConfigError: the weights cannot be used, see `stage_weights`; or the version.
        """
        require_version(version)
        weights = weights if isinstance(weights, StagedWeights) else self.stage_weights(weights)
        old, self._params, self.policy_version = self._params, weights.params, version
        self._staging.restart()
        if self._scorer:
            self._scorer.restart()
        return old

    def next_scores(self, request: Request) -> jax.Array:
        """The model's scores of the token that follows a request's given tokens, as its decode step computes them.

        Args:
            request: of one sample. Its tokens are read by the programs that draw; its policy changes no score.
        Returns:
            float32 [vocab].
        Raises:
            RunError: the engine is not idle.
            PromptError, ConfigError: as in `submit`.
        """
        if not self.idle:
            raise RunError("scores are looked at in an idle engine; finish what runs, or use another")
        (given,) = request.given
        plain = SamplingParams(max_new_tokens=given.size + 1, ignore_eos=True, remove_invalid_values=True)  # goes on
        self.submit(Request(request.prompt_id, request.prompt_tokens, plain, given=(given,)))
        try:
            while not (ready := self._staging.ready()):
                self._prefill()
            self._admit(*ready)
            (slot,) = self._resident
            for done in range(0, given.size, DECODE_STEPS):
                self._decode(min(DECODE_STEPS, given.size - done))
            with jax.default_matmul_precision(self._model.matmul_precision):
                scores = jax.jit(next_logits, static_argnums=0, compiler_options=dict(compiler_options()))
                logits, _ = scores(self._model, self._params, self._state)
            return logits[slot]
        finally:
            self.abort()

    @property
    def idle(self) -> bool:
        """True if nothing waits and nothing runs."""
        scored = self._scorer is None or self._scorer.idle
        return scored and not (self._waiting or self._staging or self._resident or self._finished)

    @property
    def waiting(self) -> int:
        """Requests that still have samples to draw and no slot for them."""
        return len(self._waiting) + len(self._staging)

    def stats(self) -> EngineStats:
        """What has been done so far."""
        return EngineStats(
            slots=self.geometry.slots,
            slots_busy=len(self._resident),
            waiting=self.waiting,
            programs_compiled=self._programs.compiled + (2 if self._scorer else 0),
            **self._counts,
        )

    def automaton(self, params: SamplingParams) -> Followed | None:
        """See `Intake.automaton`."""
        return self._intake.automaton(params)

    def _grow(self, capacity: Capacity) -> None:
        """Makes room for larger policies or other grammars, between two decode calls; rows under way keep theirs."""
        while self._scorer and not self._scorer.idle:
            self._finished += self._score()
        programs, scorer = self._programs, self._scorer
        if capacity != self._capacity:
            log.warning("compiling once more, for policies of %s", capacity)
            programs, scorer = self._compiled(capacity, programs), None
        self._capacity, moved = capacity, self._grammars.rearrange(capacity)
        rows = (self._resident.get(slot) for slot in range(self.geometry.slots))
        policies = [self._lowered(row and row.group) for row in rows]
        state = placed(self._model.mesh, rearranged(self._state, policies, capacity, moved))
        self._programs, self._scorer, self._state = programs, scorer, state

    def _compiled(self, capacity: Capacity, earlier: Programs | None = None) -> Programs:
        sizes = self.info.tokenizer_len, self.geometry, capacity
        return compile_programs(self._model, *sizes, self._params, self._vocabulary, earlier=earlier)

    def _lowered(self, group: OpenGroup | None) -> Policy:
        if group is None:
            return lower(SamplingParams(), self._capacity)
        return lower(group.params, self._capacity, self._grammars.first_state(group.params.grammar, group.automaton))

    def _tables(self) -> GrammarTables:
        """What decode programs know of grammars: the tables, and the masks of rows that are stepped on the host."""
        tables = self._grammars.tables
        return masked(tables, self._resident, self.geometry.slots) if self._capacity.token_masks else tables

    def _prefill(self) -> None:
        """Reads waiting prompts for one pass."""
        self._staging.seat(self._waiting)
        self._counts["prefill_tokens"] += self._staging.read(self._programs.prefill, self._params)

    def _admit(self, row: int, group: OpenGroup) -> None:
        """Fills free slots with samples of the prompt in a staging row."""
        entering = {}
        while self._free and group.pending:
            slot = self._free.pop()
            entering[slot] = group.pending.popleft()
            self._resident[slot] = Resident.of(group, entering[slot])
        admission = group.admission(entering, self.geometry, self._lowered(group))
        self._state = self._programs.admit(self._state, self._staging.cache, np.int32(row), admission)
        if not group.pending:
            self._staging.leave(row)

    def _decode(self, max_steps: int = DECODE_STEPS) -> None:
        running = len(self._resident)
        width = self._programs.width_for(running)
        # With work waiting, every freed slot is worth a stop; otherwise only what a narrower program can take over is.
        min_active = running if self.waiting else self._programs.width_below(width) + 1
        some = [] if width == self.geometry.slots else [np.array([*self._resident, *self._free][:width], np.int32)]
        on_host = any(row.matcher for row in self._resident.values())
        self._state, steps, busy = self._programs.decode[width](
            self._params,
            self._state,
            self._vocabulary,
            self._tables(),
            np.int32(self.policy_version),
            np.int32(1 if on_host else max_steps),
            np.int32(min_active),
            *some,
        )
        self._state = stepped(self._state, self._resident, self._model.mesh)
        self._counts["steps"] += int(steps)
        self._counts["row_steps"] += int(steps) * width
        self._counts["busy_row_steps"] += int(busy)

    def _collect(self) -> list[Group]:
        """Takes finished rows out of their slots and returns the groups that are complete with them."""
        stop = np.asarray(self._state.stop)
        ended = [slot for slot in self._resident if stop[slot] != 0]
        if not ended:
            return []
        state = self._state
        buffer, lengths, overrun, record, versions = jax.device_get(
            (state.rows.buffer, state.rows.length, state.overrun, state.record, state.policy_versions)
        )
        complete = []
        for slot in ended:
            row = self._resident.pop(slot)
            self._free.append(slot)
            prompt_len = row.group.request.prompt_tokens.size
            drawn = slice(prompt_len, int(lengths[slot]))
            last = row.group.finish(
                row.sample,
                buffer[slot, drawn].copy(),
                jax.tree.map(lambda leaf, slot=slot, drawn=drawn: leaf[slot, drawn].copy(), record),
                versions[slot, drawn].copy(),
                stop_code=int(stop[slot]),
                ended_at=int(overrun[slot]) - prompt_len - 1 if overrun[slot] else None,
                begun=row.admitted,
            )
            complete += [row.group] if last else []
            self._counts["completions"] += 1
            self._counts["tokens"] += drawn.stop - drawn.start
        return self._close(complete)

    def _score(self) -> list[Group]:
        """Scores for one pass and returns the groups that are complete with it."""
        assert self._scorer is not None
        complete = []
        for (group, sample, began), scored in self._scorer.step(self._params, self._vocabulary, self._grammars.tables):
            complete += [group] if group.finish_scored(sample, scored, self.policy_version, began) else []
            self._counts["completions"] += 1
            self._counts["scored_tokens"] += sample.given.size
        return self._close(complete)

    def _score_later(self, group: OpenGroup) -> None:
        if self._scorer is None:
            sizes = self.info.tokenizer_len, self.geometry.cache_len, self._capacity
            self._scorer = Scorer(self._model, *sizes, self._params, self._vocabulary, self._grammars.tables)
        for sample in group.pending:
            states = self._grammars.states(group.params.grammar, group.automaton, sample.given)
            known = (group.request.prompt_tokens, sample.given, group.params, group.limit, states)
            self._scorer.add(KnownSequence(*known, group.stepped), (group, sample, time.monotonic()))

    def _close(self, groups: Iterable[OpenGroup]) -> list[Group]:
        closed = []
        for group in groups:
            self._grammars.release(group.params.grammar)
            closed.append(group.closed())
        self._counts["groups"] += len(closed)
        return closed
