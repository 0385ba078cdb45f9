"""A world for the router core: a worker that checks what it is told, a client that checks what it gets."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from moeserve.messages.kv_events import encode_batch
from moeserve.messages.pages import Tier
from moeserve.messages.sampling import SamplingParams, TextOptions
from moeserve.messages.schema import (
    DetokenizeEnd,
    DetokenizeStart,
    GenerateRequest,
    PrefillProgress,
    RequestError,
    StopHit,
    TokensItem,
    TokensOut,
)
from moeserve.messages.slot_kinds import first_slots, kind_of
from moeserve.messages.steps import StepPlan, StepResult
from moeserve.router.core.kv_memory import KvMemory
from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.radix_node import depth
from moeserve.router.core.scheduler import Scheduler
from moeserve.router.core.steps.plans_in_flight import MAX_PLANS_IN_FLIGHT
from tests.support.clients.kv_subscriber import Subscriber
from tests.support.router.checking_worker import STOP_TOKEN, CheckingWorker


def request(
    id: int,
    prompt: int | list[int],
    max_tokens: int,
    *,
    priority: int = 0,
    arrival: float | None = None,
    key_name: str = "",
    cache_salt: str = "",
    adapter: str = "",
    progress: bool = False,
    **sampling: object,
) -> GenerateRequest:
    """Its seed is its id, so that the worker below can tell whose rows it computes. A prompt of so many tokens
    is like no other's."""
    tokens = [100_000 + id, *range(1, prompt)] if isinstance(prompt, int) else prompt
    return GenerateRequest(
        id=id,
        token_ids=array("i", tokens).tobytes(),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,), seed=id, **sampling),  # type: ignore[arg-type]
        text=TextOptions(),
        arrival=float(id) if arrival is None else arrival,
        priority=priority,
        key_name=key_name,
        cache_salt=cache_salt,
        adapter=adapter,
        progress=progress,
    )


@dataclass
class Seen:
    """What the detokenizer was told of one request."""

    opened: bool = False
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)
    final: TokensItem | RequestError | DetokenizeEnd | None = None


class World:
    """A scheduler, its worker, and everything it said. Time is the number of steps done."""

    def __init__(self, limits: Limits, step_ms: Callable[[StepResult], float] = lambda _: 0.0) -> None:
        """`step_ms`: how long steps take; 0 says that nobody measures it."""
        self.limits = limits
        self.step_ms = step_ms
        self.scheduler = Scheduler(limits)
        self.worker = CheckingWorker(limits)
        self.in_flight: deque[StepPlan] = deque()
        self.seen: dict[int, Seen] = {}
        self.subscriber = Subscriber()  # of KV events
        self.dead = False
        self.lost = False
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

    def lose_worker(self, *, go_on: bool = True) -> None:
        """It is gone with its KV and the plans in flight; until `find_worker`, nothing may be planned."""
        self.lost = True
        self.in_flight.clear()
        self.scheduler.worker_lost("signal 9", go_on=go_on)
        self._read()

    def find_worker(self, *, crashed_by_itself: bool = True) -> None:
        """Another one, which knows nothing."""
        self.lost = False
        before = self.worker
        self.worker = CheckingWorker(self.limits)
        self.worker.script, self.worker.last_step = before.script, self.scheduler.last_planned
        self.worker.tiers = before.tiers
        self.worker.tiers.connect()
        self.scheduler.worker_ready("signal 9", crashed_by_itself=crashed_by_itself)
        self._read()

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            assert not self.dead
            assert not self.lost
            self._check_kinds(plan)
            self.in_flight.append(plan)
            assert len(self.in_flight) <= MAX_PLANS_IN_FLIGHT
        self._read()
        return plan

    def _check_kinds(self, plan: StepPlan) -> None:
        """Each slot has room for what its position ends."""
        kinds = self.limits.slot_kinds
        firsts = first_slots(kinds)
        for row in plan.rows if kinds else ():
            start = max(row.start, 0)
            for position, slot in enumerate(array("i", row.kv_slots), start):
                if row.start >= 0:
                    assert bisect_right(firsts, slot) - 1 == kind_of(kinds, position)

    def result(self) -> None:
        """The worker finishes its oldest plan."""
        if self.in_flight:
            self.now += 1.0
            result = self.worker.step(self.in_flight.popleft())
            ms = self.step_ms(result)
            told = msgspec.structs.replace(result, compute_ms=ms)
            if not ms:
                told = msgspec.structs.replace(told, draft_ms=0.0, draft_wait_ms=0.0)
            self.scheduler.step_result(told, self.now)
            self._read()

    def worker_id(self, req_slot: int, plan: StepPlan) -> int:
        """The request that has this slot when the plan, which is not executed yet, is."""
        for new in plan.new_seqs:
            if new.req_slot == req_slot:
                return new.sampling.seed
        return self.worker.bound[req_slot].id

    def fail_row(self, row: int, cause: str) -> None:
        """The worker finishes its oldest plan, of which one row's results are wrong."""
        self.now += 1.0
        result = self.worker.step(self.in_flight.popleft())
        self.scheduler.step_result(msgspec.structs.replace(result, failed_rows={row: cause}), self.now)
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
                case DetokenizeStart():
                    assert not self.seen[message.id].opened
                    self.seen[message.id].opened = True
                case TokensOut():
                    for item in message.items:
                        self._item(item)
                case DetokenizeEnd() | RequestError():
                    self._final(message.id, message)

    def _item(self, item: TokensItem) -> None:
        seen = self.seen[item.id]
        assert seen.opened
        assert seen.final is None, "nothing comes after the final message"
        seen.tokens += item.token_ids
        seen.progress += [] if item.progress is None else [item.progress]
        seen.prompt_logprobs += [entry.token_id for entry in item.prompt_logprobs or []]
        assert (item.finish_reason is None) == (item.usage is None)
        if item.finish_reason is not None:
            self._final(item.id, item)

    def _final(self, id: int, message: TokensItem | RequestError | DetokenizeEnd) -> None:
        assert self.seen[id].final is None, "one final message only"
        self.seen[id].final = message

    def check(self, *, slots: bool = True) -> None:
        """The counts; and each single slot."""
        self.scheduler.check()
        if slots:
            self.scheduler.check_slots()
        if self.limits.event_block_size is not None:
            self._check_events(self.limits.event_block_size)
        running = len(self.scheduler._batch.running)
        assert running <= min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)

    def _check_events(self, size: int) -> None:
        """The subscriber has as many blocks as the prefix tree has whole ones. (Which: `test_block_log.py`.)"""
        self.subscriber.apply(encode_batch(0.0, self.scheduler.take_kv_events(), as_maps=True))
        memory = self.scheduler._memory
        assert isinstance(memory, KvMemory)
        nodes = memory._tree.nodes()
        ends = [(depth(node) - len(node.slots), depth(node)) for node in nodes]
        assert len(self.subscriber.blocks) == sum(end // size - start // size for start, end in ends)

    def check_all_free(self) -> None:
        self.check()
        report = self.scheduler.load_report()
        assert (report.num_running, report.num_waiting, report.kv_slots_used) == (0, 0, 0)
        assert self.scheduler.is_idle


def make_world(
    num_kv_slots: int = 1000,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_num_queued_reqs: int = 100,
    max_model_len: int = 500,
    num_state_slots: int = 0,
    page_tokens: int = 0,
    tiers: tuple[Tier, ...] = ("disk",),
) -> World:
    return World(
        Limits(
            num_kv_slots,
            max_num_seqs,
            max_model_len,
            max_num_batched_tokens,
            max_num_queued_reqs,
            num_state_slots=num_state_slots,
            page_tokens=page_tokens,
            tiers=tiers,
        )
    )


def final_item(world: World, id: int) -> TokensItem:
    final = world.seen[id].final
    assert isinstance(final, TokensItem)
    return final


def final_error(world: World, id: int) -> RequestError:
    final = world.seen[id].final
    assert isinstance(final, RequestError)
    return final


def rows_of(plan: StepPlan | None) -> list[tuple[int, int, bool]]:
    """(start, count, sample) of each row."""
    assert plan is not None
    return [(row.start, row.count, row.sample) for row in plan.rows]
