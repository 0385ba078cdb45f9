"""The worker in virtual time: it executes plans in order, and each takes as long as the step-time model says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from moeserve.cli.simulate.step_time import StepLoad, StepTime, load_of
from moeserve.cli.simulate.tiers import SimulatedTiers, TierModel
from moeserve.messages.pages import TIERS, Tier
from moeserve.messages.steps import ExpertUse, MeasuredStep, Sampled, StepPlan, StepResult, WorkerReady
from moeserve.messages.worker import Worker
from moeserve.router.core.limits import Limits

ANSWER_ID, STOP_ID = 1, 2  # token ids that are lower than all ids of prompts (workload.prompts)
VOCAB_SIZE = 1 << 17
PAGE_TOKENS = 32  # per page of a tier, as in the real worker
IDLE_WAIT_S = 0.01  # how long a plan without rows waits for a page, as in the real worker
_ANSWER, _STOP = Sampled(ANSWER_ID), Sampled(STOP_ID)


@dataclass(frozen=True, slots=True)
class Timing:
    """Times beside those of the step-time model, in seconds."""

    # httpserver's work per request, one request after another: parsing, tokenising, validation.
    frontend: float
    reply: float  # from the router to the client, per token
    hop: float  # a plan from the router to an idle worker, and a result back
    # Between two steps when the second plan has arrived before the first step ends, and is not launched before.
    gap: float
    # Added to a step per token, because the other processes share the worker's cores.
    token_cpu: float = 0.0
    connect: float = 0.0  # opening a connection on the client's side (`connections.py`)


def virtual_ready(
    *,
    num_kv_slots: int,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    num_experts: int,
    experts_per_token: int,
    num_state_slots: int,
    tiers: Collection[Tier] = (),
    prompts_first: bool = False,
    measured_steps: Sequence[MeasuredStep] = (),
    ram_step_tokens: int = 0,
) -> WorkerReady:
    """Returns the WorkerReady of a worker without weights. ram_step_tokens: the most tokens whose KV a step copies to
    the tier in RAM; 0: all at once, if disk is the only tier."""
    names = [name for name in TIERS if name in tiers]
    return WorkerReady(
        num_kv_slots=num_kv_slots,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        weight_bytes=0,
        kv_bytes=0,
        device="virtual",
        max_num_batched_tokens=max_num_batched_tokens,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        num_state_slots=num_state_slots,
        kv_page_tokens=PAGE_TOKENS if names else 0,
        kv_page_bytes=PAGE_TOKENS,  # as if a token took 1 byte
        kv_write_bytes=ram_step_tokens or 8 << 20,
        kv_tiers=names,
        prompts_first=prompts_first,
        measured_steps=list(measured_steps),
    )


class VirtualWorker(Worker):
    """Samples made-up tokens. The simulation sets `now` before each `step`, and takes the result at `result_at`."""

    def __init__(
        self,
        limits: Limits,
        step_time: StepTime,
        timing: Timing,
        output_lens: Mapping[int, int],
        tiers: Mapping[Tier, TierModel] | None = None,
    ) -> None:
        """`output_lens`: the number of tokens after which each answer ends, by request id; an entry is read when its
        request is first planned. The seed in a request's sampling parameters must be the request's id. `tiers`: the
        same as in `limits`; None: none."""
        self._limits = limits
        self._step_time = step_time
        self._timing = timing
        self._output_lens = output_lens
        self._tiers = SimulatedTiers(tiers, limits.page_tokens) if tiers else None
        self._last_position: dict[int, int] = {}  # by request slot: the position of the stop token
        self._free_at = 0.0
        self.now = 0.0  # when the router sends the next plan, in seconds; written by the simulation
        self.result_at = 0.0  # when the router has the last plan's result, in seconds
        self.busy = 0.0  # seconds spent in steps so far
        self.tokens = 0  # tokens of these steps

    def ready(self) -> WorkerReady:
        limits = self._limits
        return virtual_ready(
            num_kv_slots=limits.num_kv_slots,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_experts=limits.num_experts,
            experts_per_token=limits.experts_per_token,
            num_state_slots=limits.num_state_slots,
            tiers=() if self._tiers is None else self._limits.tiers,
            prompts_first=self._step_time.prompts_first,
            measured_steps=self._step_time.measured_steps,
        )

    def expert_use(self) -> ExpertUse:
        """Returns no counts, because nothing is routed in virtual time."""
        return ExpertUse(0, self._limits.num_experts, self._limits.experts_per_token, b"", b"")

    def step(self, plan: StepPlan) -> StepResult:
        copying = 0.0
        if self._tiers is not None and plan.pages is not None:
            copying = self._tiers.order(plan.pages, max(self.now + self._timing.hop, self._free_at))
        if not plan.rows:
            return self._wait_for_pages(plan.step)
        for new in plan.new_seqs:
            end = new.num_prompt + self._output_lens[new.sampling.seed] - 1
            self._last_position[new.req_slot] = end
        load = load_of(plan)
        seconds = self._step_time.of(load) + self._timing.token_cpu * load.sampled_rows + copying
        arrival = self.now + self._timing.hop
        start = max(arrival, self._free_at + self._timing.gap)
        if arrival <= self._free_at and self._may_follow(plan, load):
            start = self._free_at
        elif load.is_decode:
            seconds += self._step_time.launch
        idle = start - self._free_at
        self._free_at = start + seconds
        self.busy += seconds
        self.tokens += load.tokens
        last = self._last_position
        sampled = [
            _STOP if row.start + row.count == last[row.req_slot] else _ANSWER
            for row in plan.rows
            if row.sample
        ]
        self.result_at = self._free_at + self._timing.hop
        pages = None if self._tiers is None else self._tiers.report(self._free_at)
        return StepResult(plan.step, sampled, {}, compute_ms=seconds * 1e3, idle_ms=idle * 1e3, pages=pages)

    def _may_follow(self, plan: StepPlan, load: StepLoad) -> bool:
        """Returns whether the step is launched while the previous one is computed; see
        `OverlappingWorker.may_follow`."""
        most = self._step_time.ahead_tokens
        is_small = load.tokens <= most or (most > 0 and load.is_decode)
        return is_small and not (plan.new_seqs or plan.forks or plan.state_copies or plan.pages is not None)

    def _wait_for_pages(self, step: int) -> StepResult:
        """Executes a plan without rows: waits for pages."""
        assert self._tiers is not None
        self._free_at = max(self.now + self._timing.hop, self._free_at)
        pages = self._tiers.report(self._free_at)
        if pages is None and self._tiers.next_at is not None:
            self._free_at = min(self._tiers.next_at, self._free_at + IDLE_WAIT_S)
            pages = self._tiers.report(self._free_at)
        self.result_at = self._free_at + self._timing.hop
        return StepResult(step, [], {}, compute_ms=0.0, idle_ms=0.0, pages=pages)
