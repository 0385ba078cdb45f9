"""Executes plans: bind -> layout -> forward -> prompt logprobs -> sample -> result. No loop here runs over tokens.

An `Engine` (`worker/engines`) does the device-specific work. If it `runs_ahead`, the layers of the next plan may be
launched before the running step's tokens are read, so that the device does not idle: forward of N+1, tokens and
result of N, then N+1's sampling, which waits for the grammar masks after N. Where one of the two has drafts, N+1
depends on N's tokens: it is launched when they are known, before N's result is returned.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import msgspec
import numpy as np

from moeserve.messages.adapters import AdaptersReport, AdapterState, AdaptersWanted
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import (
    ExpertUse,
    NewSeq,
    Row,
    StepPlan,
    StepResult,
    WorkerReady,
)
from moeserve.worker.adapters.resident import ResidentAdapters
from moeserve.worker.constraints.slot_guides import Constraints
from moeserve.worker.drafts.draft_rows import DraftRows
from moeserve.worker.drafts.drafting import Drafting
from moeserve.worker.drafts.forced_acceptance import ForcedAcceptance
from moeserve.worker.drafts.run_sampler import RunSampler
from moeserve.worker.engines.disk_reads import DiskReads
from moeserve.worker.engines.engine import Engine
from moeserve.worker.plans.launched_step import LaunchedStep, StepTimes
from moeserve.worker.plans.plan_orders import PlanOrders
from moeserve.worker.recording.step_recorder import StepRecorder
from moeserve.worker.sequences import Sequences, StepLayout, entries, log_bound
from moeserve.worker.tiers.page_mover import PageMover

log = logging.getLogger(__name__)


class Runner:
    """Owns the requests' tokens and grammars; the engine owns model, KV cache and sampler. Steps run one at a time,
    in the order of the calls."""

    def __init__(
        self,
        engine: Engine,
        ready: WorkerReady,
        constraints: Constraints,
        recorder: StepRecorder | None = None,
        pages: PageMover | None = None,
        adapters: ResidentAdapters[Any] | None = None,
        drafting: Drafting | None = None,
        disk: DiskReads | None = None,
    ) -> None:
        """pages: the tiers behind the KV pool; None: there are none. adapters: None if requests cannot use any.
        drafting: None if rows have no drafts. disk: None if all weights are in memory."""
        self.engine = engine
        self._ready = ready
        if disk is not None and disk.experts is not None:
            self._ready = msgspec.structs.replace(ready, disk_wait_s=disk.experts.longest_wait_s)
        self._adapters = adapters
        numbers = None if adapters is None else adapters.numbers
        has_windows = ready.num_window_slots > 0
        self._sequences = Sequences(
            ready.max_num_seqs, ready.max_model_len, numbers, has_window_slots=has_windows
        )
        self._constraints = constraints
        self._drafts: DraftRows | None = None
        if drafting is not None:
            drafter = drafting.drafter(self._sequences)
            notes = drafting.reading, drafting.most, drafting.late, drafting.keeping
            on_gpu = not engine.waits_for_logits
            self._drafts = DraftRows(self._sequences, drafter, *notes, on_gpu=on_gpu)
            self._drafting_engine = drafting.engine
            self._runs = RunSampler(drafting.engine, self._sequences, constraints, self._drafts)
        self._recorder = recorder
        self._disk = disk
        wrong = None if disk is None else disk.wrong
        settle_drafter = () if self._drafts is None else (self._drafts.catch_up,)
        self._orders = PlanOrders(engine, pages, wrong, *settle_drafter)
        self._step_ended = time.perf_counter()
        self._under_way: LaunchedStep | None = None
        # Whether any plan `may_follow`.
        self.runs_ahead = engine.runs_ahead and recorder is None

    def force_acceptance(self, right: float) -> None:
        """Makes this share of the drafts be accepted, whatever is sampled: for benchmarks with drafts."""
        assert self._drafts is not None
        self._runs.force(ForcedAcceptance(self._drafting_engine, self._sequences, self._drafts, right))

    def ready(self) -> WorkerReady:
        return self._ready

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one plan. Plans come from the router and are trusted; any exception is fatal to the worker."""
        if not plan.rows:
            idle_ms = (time.perf_counter() - self._step_ended) * 1e3
            self._orders.execute(plan)
            return StepResult(plan.step, [], {}, 0.0, idle_ms, pages=self._orders.page_report(may_wait=True))
        self.start(plan)
        return self.finish()

    # ---------------------------------------------------------------- a step in two halves

    def start(self, plan: StepPlan) -> None:
        """Launches a plan with rows while no step is running; `finish` returns its result."""
        self.engine.begin()
        self._under_way = self._launch(plan)
        self.launch_rest()

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    @property
    def is_computed(self) -> bool:
        """Returns whether `finish` would return without waiting. May be called after `launch_rest`."""
        return self.engine.is_computed

    def may_follow(self, plan: StepPlan) -> bool:
        """Returns whether `advance` accepts this plan: it has only rows of known or currently sampled tokens, and is
        launched fast enough not to delay the running step's result."""
        step, rows = self._under_way, plan.rows
        return (
            self.runs_ahead
            and step is not None
            and bool(rows)
            and (self._needs_result(plan) or len(step.layout.sampled_rows) <= self.engine.logit_rows)
            and self.engine.launches_at_once([row.count for row in rows], [row.drafts for row in rows])
            and not (plan.new_seqs or plan.forks or plan.state_copies or plan.pages is not None)
            and not (plan.grammars or plan.dropped_grammars)
            and all(self._sequences.prompt_logprobs[row.req_slot] is None for row in rows)
        )

    def _needs_result(self, plan: StepPlan) -> bool:
        """Returns whether the plan's rows depend on the tokens of the running step: one of the two may have drafts."""
        step = self._under_way
        return (step is not None and step.drafted is not None) or any(row.drafts for row in plan.rows)

    def advance(self, plan: StepPlan) -> StepResult:
        """Launches a plan's layers after the running step, and returns the running step's result. Call `launch_rest`
        next."""
        running, needs_result = self._under_way, self._needs_result(plan)
        assert running is not None
        following = None if needs_result else self._launch(plan)
        running.is_followed = following is not None
        has_drafts = needs_result and self._launch_drafts(plan)
        times = self._end(running)
        if following is None:
            # Before the running step's result is made: a GPU waits.
            if not has_drafts:
                self.engine.begin()
            following = self._launch(plan)
        self._under_way = following
        return self._result(running, times)

    def _launch_drafts(self, plan: StepPlan) -> bool:
        """Launches the plan's drafts after the running step, if they can follow tokens that are not read. Returns
        whether it did."""
        step, drafts = self._under_way, self._drafts
        if step is None or drafts is None:
            return False
        pending = self._runs.pending_tokens if step.drafted is not None else step.pending_tokens
        return pending is not None and drafts.launch_ahead(plan.rows, pending)

    def launch_rest(self) -> None:
        """Launches the running step's sampling, if it is not launched. May wait for masks that depend on the
        previous step's tokens."""
        if self._under_way is not None and not self._under_way.is_launched:
            self._sample(self._under_way)

    def finish(self) -> StepResult:
        """Waits for the running step, and returns its result."""
        step = self._under_way
        assert step is not None
        return self._result(step, self._end(step))

    def _end(self, step: LaunchedStep) -> StepTimes:
        """Waits for the running step and reads its tokens. Afterwards no step is running."""
        assert step.is_launched
        self._read(step)
        device_ms = self.engine.finish()
        if step.record is not None:
            step.record.finish(step.sampled)
        ended = time.perf_counter()
        times = step.times(ended, self._step_ended, device_ms, self.engine.layers_ms)
        self._step_ended, self._under_way = ended, None
        return times

    def _result(self, step: LaunchedStep, times: StepTimes) -> StepResult:
        """Returns the result of a step that has ended. The next one may be running."""
        if step.compiled:
            log.warning(
                "step %d waited for %d kernels to be compiled or loaded, or CUDA graphs to be captured: %.0f ms",
                step.plan.step,
                step.compiled,
                times.compute_ms,
            )
        pages, cache = self._orders.page_report(), self.engine.take_expert_cache_counts()
        disk = None
        if self._disk is not None:
            is_followed = self._under_way is not None
            disk = self._disk.end_step(step.layout, self._sequences, is_followed=is_followed)
        return StepResult(
            step.plan.step,
            step.sampled,
            step.prompt_logprobs,
            times.compute_ms,
            times.idle_ms,
            step.compiled,
            step.mask_ms,
            pages,
            cache,
            times.draft_ms,
            times.draft_wait_ms,
            None if disk is None else disk.experts,
            None if disk is None else disk.table,
            {} if disk is None else disk.failed_rows,
            step.draft_read_ms,
            step.lagging_rows,
            0.0 if self._drafts is None else self._drafts.take_keep_ms(),
        )

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        """Launches all but the sampling."""
        started = time.perf_counter()
        self._orders.execute(plan)
        compiled_before = self.engine.kernels_compiled
        for seq in plan.new_seqs:
            self._bind(seq)
        if plan.forks:
            self.engine.fork(*self._sequences.fork(plan.forks))
        rows, drafted, draft_ms, read_ms, has_waited = plan.rows, None, 0.0, 0.0, False
        drafts: list[int] = []
        lagging: list[int] = []
        if self._drafts is not None:
            rows, drafts = self._drafts.place(
                rows, is_awaited=self._under_way is not None, keeps_block=plan.keeps_block
            )
            draft_ms, read_ms, lagging = (
                self._drafts.draft_ms,
                self._drafts.read_ms,
                self._drafts.lagging_rows,
            )
            # A step without drafts is sampled as where there are none: at less cost, and launched ahead on a GPU.
            drafted = drafts if any(drafts) else None
            has_waited = self._drafts.has_waited
        layout = StepLayout(rows, drafts if has_waited else None)
        recorder = self._recorder
        record = None if recorder is None else recorder.start(layout, self._sequences, self._ready)
        self.engine.forward(layout, self._sequences, has_new=bool(plan.new_seqs), observer=record)
        prompt_logprobs = self._prompt_logprobs(rows, layout)
        return LaunchedStep(
            *(plan, layout, record, started, -compiled_before, prompt_logprobs),
            drafted=drafted,
            draft_ms=draft_ms,
            late_ms=None if self._drafts is None else self._drafts.late_ms,
            draft_read_ms=read_ms,
            lagging_rows=lagging,
        )

    def rehearse(self, plan: StepPlan) -> StepResult:
        """Runs a plan as `step` does, before the first request and in free slots, and removes its KV, counts and
        records."""
        recorder, self._recorder = self._recorder, None
        with self._orders.without_pages():
            result = self.step(plan)
        self._recorder = recorder
        self.engine.forget(StepLayout(plan.rows))
        return result

    def warm_on(self, *, is_idle: bool) -> bool:
        is_left = self.engine.warm_on(is_idle=is_idle)
        self._step_ended = time.perf_counter()  # the time from here on counts as waiting for a plan
        return is_left

    def router_lost(self) -> None:
        """Forgets the plans so far: the next one comes from another router."""
        self._orders.router_lost()
        if self._adapters is not None:
            self._adapters.forget_orders()

    def expert_use(self) -> ExpertUse:
        tokens, on_gpu, cache = self.engine.expert_counts()
        layers, experts = tokens.shape
        use = ExpertUse(
            layers, experts, self._ready.experts_per_token, tokens.tobytes(), on_gpu.tobytes(), cache
        )
        experts_on_disk = None if self._disk is None else self._disk.experts
        if experts_on_disk is None:
            return use
        on_disk = experts_on_disk.on_disk(on_gpu).tobytes()
        return msgspec.structs.replace(use, on_disk=on_disk, disk=experts_on_disk.totals)

    def adapters(self, wanted: AdaptersWanted) -> AdaptersReport:
        if self._adapters is not None:
            return self._adapters.want(wanted)
        error = "this engine takes no adapters"
        return AdaptersReport([AdapterState(source.order, error=error) for source in wanted.sources])

    def _bind(self, seq: NewSeq) -> None:
        if self._drafts is not None:
            self._drafts.bind(seq)
        tokens = self._sequences.bind(seq)
        log_bound(seq, len(tokens))
        self.engine.bind(seq, tokens)
        sampling = seq.sampling
        if seq.grammar:
            sampling = msgspec.structs.replace(sampling, grammar=self._orders.grammars[seq.grammar])
        self._constraints.bind(seq.req_slot, sampling, tokens[seq.num_prompt :], seq.tenant)

    def _prompt_logprobs(self, rows: list[Row], layout: StepLayout) -> dict[int, list[TokenLogprob]]:
        found: dict[int, list[TokenLogprob]] = {}
        for span in self._sequences.prompt_spans(rows, layout, self.engine.logit_rows):
            found.setdefault(span.row, []).extend(self.engine.score(span))
        return found

    def _sample(self, step: LaunchedStep) -> None:
        """Launches the sampling; with several groups of rows, all but the last are read. With drafts, tokens that
        depend on each other are read as well."""
        layout = step.layout
        if step.drafted is not None:
            computed_s = time.perf_counter() - step.started if self.engine.waits_for_logits else math.inf
            self._runs.launch(layout, step.drafted, computed_s)
            self.engine.mark_end()
            step.compiled += self.engine.kernels_compiled
            step.is_launched = True
            return
        for first in range(0, len(layout.sampled_rows), self.engine.logit_rows):
            self._read(step)
            part = slice(first, first + self.engine.logit_rows)
            slots, positions = layout.sampled_slots[part], layout.sampled_positions[part]
            logits = self.engine.logits(layout, first)
            if step.record is not None:
                step.record.logits(first, logits)
            # Asked as late as possible: while this waits for masks, a GPU computes the logits.
            asked = time.perf_counter()
            computed_s = asked - step.started - step.mask_wait_s if self.engine.waits_for_logits else math.inf
            masks = self._constraints.masks_for(slots, computed_s)
            step.mask_wait_s += time.perf_counter() - asked
            self.engine.sample(slots, masks)
            step.pending = part
            if self.runs_ahead:
                self._sequences.expect(slots, positions)
                if self._drafts is not None:
                    self._drafts.grew(slots)
        self.engine.mark_end()
        if self._drafts is not None:
            self._drafts.computed(layout, np.zeros(len(layout.rows), np.int32))
        step.compiled += self.engine.kernels_compiled
        step.is_launched = True

    def _read(self, step: LaunchedStep) -> None:
        """Reads the tokens being sampled, if any."""
        if step.drafted is not None:
            step.sampled, step.mask_ms = self._runs.read()
            return
        if step.pending is None:
            return
        part, step.pending = step.pending, None
        slots, positions = step.layout.sampled_slots[part], step.layout.sampled_positions[part]
        tokens, logprobs = self.engine.sampled()
        verdicts = self._constraints.verdicts(slots)
        self._constraints.accept(slots, tokens, verdicts)
        self._sequences.append(slots, positions, tokens)
        if self._drafts is not None and not self.runs_ahead:
            self._drafts.grew(slots[verdicts.kept(tokens)])
        step.sampled += entries(tokens, logprobs, verdicts.failed, verdicts.late)
        step.mask_ms |= {part.start + row: ms for row, ms in verdicts.mask_ms.items()}
