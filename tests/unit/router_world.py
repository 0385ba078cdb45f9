"""A world for the router core: a worker that checks what it is told, a client that checks what it gets."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

from moeserve.messages.schema import (
    CloseText,
    GenerateRequest,
    NewSeq,
    OpenText,
    RequestError,
    Sampled,
    SamplingParams,
    StepPlan,
    StepResult,
    StopHit,
    TextOptions,
    TokenLogprob,
    TokensItem,
    TokensOut,
)
from moeserve.router.core.limits import Limits
from moeserve.router.core.scheduler import MAX_PLANS_IN_FLIGHT, Scheduler

STOP_TOKEN = 999


def ints(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


def request(
    id: int,
    prompt: int,
    max_tokens: int,
    *,
    priority: int = 0,
    arrival: float | None = None,
    **sampling: object,
) -> GenerateRequest:
    """Its prompt's first token is its id, so that the worker below can tell whose rows it computes."""
    tokens = array("i", [id, *range(1, prompt)])
    return GenerateRequest(
        id=id,
        token_ids=tokens.tobytes(),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,), **sampling),  # type: ignore[arg-type]
        text=TextOptions(),
        arrival=float(id) if arrival is None else arrival,
        priority=priority,
    )


@dataclass
class Bound:
    """A request slot as the worker keeps it."""

    new_seq: NewSeq
    id: int
    table: list[int] = field(default_factory=list)  # KV slots by position
    sampled: int = 0


class CheckingWorker:
    """Executes plans in order and asserts that every position is written once, in order, and still there when
    it is read. The n-th token of request r is `script[r][n]`, or 100 + n where there is no script."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.script: dict[int, list[int]] = {}
        self.bound: dict[int, Bound] = {}
        self.kv: dict[int, tuple[Bound, int]] = {}  # slot -> who wrote it, for which position
        self.last_step = 0

    def token(self, id: int, index: int) -> int:
        script = self.script.get(id, [])
        return script[index] if index < len(script) else 100 + index

    def step(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.last_step + 1
        self.last_step = plan.step
        self._check_limits(plan)
        for new in plan.new_seqs:
            self.bound[new.req_slot] = Bound(new, ints(new.token_ids)[0])
        sampled: list[Sampled] = []
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        for index, row in enumerate(plan.rows):
            bound = self.bound[row.req_slot]
            slots = ints(row.kv_slots)
            assert row.count == len(slots) > 0
            assert row.start == len(bound.table), "positions are written in order, each once"
            for position, slot in enumerate(slots, start=row.start):
                self.kv[slot] = (bound, position)
                bound.table.append(slot)
            for position, slot in enumerate(bound.table):
                assert self.kv[slot] == (bound, position), "a position is overwritten while it is read"
            end = row.start + row.count
            prompt = bound.new_seq.num_prompt
            assert end <= prompt or row.count == 1, "a decode row has one position"
            assert row.sample == (end >= prompt and bound.new_seq.sampling.max_tokens > 0)
            if row.sample:
                sampled.append(Sampled(self.token(bound.id, bound.sampled)))
                bound.sampled += 1
            if bound.new_seq.sampling.prompt_logprobs is not None and row.start < prompt:
                tokens = ints(bound.new_seq.token_ids)[row.start + 1 : end + 1]
                prompt_logprobs[index] = [TokenLogprob(t, -1.0, 1, [], []) for t in tokens]
        return StepResult(plan.step, sampled, prompt_logprobs, compute_ms=1.0, idle_ms=0.0)

    def _check_limits(self, plan: StepPlan) -> None:
        assert plan.rows
        assert sum(row.count for row in plan.rows) <= self.limits.max_num_batched_tokens
        req_slots = [row.req_slot for row in plan.rows]
        assert len(set(req_slots)) == len(req_slots) <= self.limits.max_num_seqs
        assert all(0 <= slot < self.limits.max_num_seqs for slot in req_slots)
        kv_slots = [slot for row in plan.rows for slot in ints(row.kv_slots)]
        assert len(set(kv_slots)) == len(kv_slots)
        assert all(0 <= slot < self.limits.num_kv_slots for slot in kv_slots)


@dataclass
class Seen:
    """What the detokenizer was told of one request."""

    opened: bool = False
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)
    final: TokensItem | RequestError | CloseText | None = None


class World:
    """A scheduler, its worker, and everything it said. Time is the number of steps done."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.worker = CheckingWorker(limits)
        self.in_flight: deque[StepPlan] = deque()
        self.seen: dict[int, Seen] = {}
        self.dead = False
        self.now = 0.0

    def add(self, message: GenerateRequest, script: list[int] | None = None) -> None:
        if script is not None:
            self.worker.script[message.id] = script
        self.seen[message.id] = Seen()
        self.scheduler.add(message)
        self._read()

    def abort(self, id: int) -> None:
        self.scheduler.abort(id)
        self._read()

    def stop_hit(self, id: int, num_tokens: int) -> None:
        self.scheduler.stop_hit(StopHit(id=id, num_tokens=num_tokens))
        self._read()

    def die(self) -> None:
        self.dead = True
        self.in_flight.clear()
        self.scheduler.close("the worker is gone")
        self._read()

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            assert not self.dead
            self.in_flight.append(plan)
            assert len(self.in_flight) <= MAX_PLANS_IN_FLIGHT
        self._read()
        return plan

    def result(self) -> None:
        """The worker finishes its oldest plan."""
        if self.in_flight:
            self.now += 1.0
            self.scheduler.step_result(self.worker.step(self.in_flight.popleft()), self.now)
            self._read()

    def run(self, max_steps: int = 10_000) -> int:
        """Plans and steps, as the manager does, until nothing is left; the number of steps."""
        for steps in range(max_steps):
            while self.plan() is not None:
                pass
            if not self.in_flight:
                return steps
            self.result()
        raise AssertionError("no end in sight")

    def _read(self) -> None:
        for message in self.scheduler.take_messages():
            match message:
                case OpenText():
                    assert not self.seen[message.id].opened
                    self.seen[message.id].opened = True
                case TokensOut():
                    for item in message.items:
                        self._item(item)
                case CloseText() | RequestError():
                    self._final(message.id, message)

    def _item(self, item: TokensItem) -> None:
        seen = self.seen[item.id]
        assert seen.opened
        assert seen.final is None, "nothing comes after the final message"
        seen.tokens += item.token_ids
        seen.prompt_logprobs += [entry.token_id for entry in item.prompt_logprobs or []]
        assert (item.finish_reason is None) == (item.usage is None)
        if item.finish_reason is not None:
            self._final(item.id, item)

    def _final(self, id: int, message: TokensItem | RequestError | CloseText) -> None:
        assert self.seen[id].final is None, "one final message only"
        self.seen[id].final = message

    def check(self) -> None:
        self.scheduler.check()
        self.scheduler.check_slots()
        running = self.scheduler.load_report().num_running
        assert running <= min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)

    def check_all_free(self) -> None:
        self.check()
        report = self.scheduler.load_report()
        assert (report.num_running, report.num_waiting, report.kv_slots_used) == (0, 0, 0)
        assert self.scheduler.is_idle
