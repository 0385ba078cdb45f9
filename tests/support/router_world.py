"""A world for the router core: a worker that checks what it is told, a client that checks what it gets."""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from moeserve.messages.kv_events import encode_batch
from moeserve.messages.sampling import SamplingParams, TextOptions, TokenLogprob
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
from moeserve.messages.steps import Fork, NewSeq, Row, Sampled, StepPlan, StepResult
from moeserve.router.core.limits import Limits
from moeserve.router.core.plans_in_flight import MAX_PLANS_IN_FLIGHT
from moeserve.router.core.radix_node import depth
from moeserve.router.core.scheduler import Scheduler
from tests.support.kv_subscriber import Subscriber
from tests.support.virtual_disk import UNREADABLE, VirtualDisk

STOP_TOKEN = 999
NOTHING = 0  # the prefix without tokens


def ints(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


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
class Bound:
    """A request slot as the worker keeps it."""

    new_seq: NewSeq
    tokens: list[int]  # by position; those it sampled included
    prefixes: array[int]  # int64, by position: stands for the tokens up to there
    table: array[int]  # int32: KV slots by position

    @property
    def id(self) -> int:
        return self.new_seq.sampling.seed

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self.prefixes.append(hash((self.prefixes[-1] if self.prefixes else NOTHING, token)))


BEAM_VOCABULARY = 12


def top_tokens(tokens: list[int], count: int) -> TokenLogprob:
    """What the worker below says of the next token of a beam: a distribution by all tokens before it, in which
    STOP_TOKEN is as likely as others."""
    draw = random.Random(hash(tuple(tokens)))
    weights = [draw.random() ** 3 + 1e-3 for _ in range(BEAM_VOCABULARY)]
    names = [STOP_TOKEN, *range(1, BEAM_VOCABULARY)]
    ranked = sorted(zip(names, weights, strict=True), key=lambda pair: -pair[1])[:count]
    logprobs = [math.log(weight / sum(weights)) for _, weight in ranked]
    ids = [name for name, _ in ranked]
    return TokenLogprob(ids[0], logprobs[0], 1, ids, logprobs)


class CheckingWorker:
    """Executes plans in order. Each slot remembers the tokens whose KV it holds, all of them from the first;
    every row asserts that what it reads is there, whoever wrote it. So does each slot of recurrent state: a row asserts
    that its state is that of exactly the tokens before it. The n-th token of request r is `script[r][n]`, or 100 + n
    where there is no script."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.script: dict[int, list[int]] = {}
        self.bound: dict[int, Bound] = {}
        self.kv = np.full(limits.num_kv_slots, UNREADABLE)  # slot -> the prefix that it ends
        self.states: dict[int, int] = {}  # state slot -> the prefix that it has consumed
        self.disk = VirtualDisk(limits.page_tokens)
        self.copies = 0  # between state slots
        self.last_step = 0
        self.computed = 0  # positions

    def token(self, id: int, index: int) -> int:
        script = self.script.get(id, [])
        return script[index] if index < len(script) else 100 + index

    def step(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.last_step + 1
        self.last_step = plan.step
        self._check_limits(plan)
        if plan.pages is not None:
            self.disk.write(plan.pages, self.kv, self.states)
        self._copy_states(ints(plan.state_copies))
        if plan.pages is not None:
            self.disk.load(plan.pages, self.kv, self.states)
        for new in plan.new_seqs:
            self._bind(new)
        for fork in plan.forks:
            self._fork(fork)
        for row in plan.rows:  # all are written before any is read
            self._write(row)
        sampled: list[Sampled] = []
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        for index, row in enumerate(plan.rows):
            bound = self.bound[row.req_slot]
            held = self.kv[np.frombuffer(bound.table, np.int32)]
            known = np.frombuffer(bound.prefixes, np.int64)[: len(held)]
            assert np.array_equal(held, known), "a slot does not hold what is read from it"
            del known  # nothing can be appended to what it is a view of
            end = row.start + row.count
            self._advance_state(bound, row.start, end)
            prompt = bound.new_seq.num_prompt
            if row.sample:
                if (wanted := bound.new_seq.sampling.logprobs) is not None:  # it is a beam's
                    top = top_tokens(bound.tokens[:end], wanted)
                    sampled.append(Sampled(top.token_id, top))
                else:
                    sampled.append(Sampled(self.token(bound.id, end - prompt)))
                bound.push(sampled[-1].token_id)
            if bound.new_seq.sampling.prompt_logprobs is not None and row.start < prompt:
                tokens = bound.tokens[row.start + 1 : min(end + 1, prompt)]
                prompt_logprobs[index] = [TokenLogprob(t, -1.0, 1, [], []) for t in tokens]
        pages = None
        if self.limits.page_tokens:
            pages = self.disk.report(self.kv, self.states, may_wait=not plan.rows)
        return StepResult(plan.step, sampled, prompt_logprobs, compute_ms=0.0, idle_ms=0.0, pages=pages)

    def _bind(self, new: NewSeq) -> None:
        bound = Bound(new, [], array("q"), array("i", new.prefix_slots))
        for token in ints(new.token_ids):
            bound.push(token)
        is_beam = new.num_prompt == 0  # without tokens until a fork
        assert is_beam or len(bound.table) < len(bound.tokens), "the last known token is always computed"
        self.bound[new.req_slot] = bound

    def _fork(self, fork: Fork) -> None:
        """The source has one token more, which it has sampled by itself."""
        source, target = self.bound[fork.source], self.bound[fork.target]
        assert source.id == target.id
        assert len(source.table) >= fork.position
        if target is not source:
            target.tokens = source.tokens[: fork.position]
            target.prefixes = source.prefixes[: fork.position]
            target.table = source.table[: fork.position]
        assert len(target.table) == fork.position
        del target.tokens[fork.position :], target.prefixes[fork.position :]
        target.push(fork.token_id)

    def _write(self, row: Row) -> None:
        bound = self.bound[row.req_slot]
        slots = ints(row.kv_slots)
        known = len(bound.tokens)
        assert row.count == len(slots) > 0
        assert row.start == len(bound.table), "positions are written in order, each once"
        assert row.start + row.count <= known, "a token is computed that nobody has sampled"
        assert row.sample == (row.start + row.count == known and bound.new_seq.sampling.max_tokens > 0)
        self.kv[slots] = bound.prefixes[row.start : row.start + row.count]
        bound.table.extend(slots)
        self.computed += row.count

    def _copy_states(self, copies: list[int]) -> None:
        for source, destination in zip(copies[::2], copies[1::2], strict=True):
            assert 0 <= destination < self.limits.num_state_slots
            self.states[destination] = NOTHING if source == -1 else self.states[source]
            self.copies += source != -1

    def _advance_state(self, bound: Bound, start: int, end: int) -> None:
        slot = bound.new_seq.state_slot
        assert (slot == -1) == (self.limits.num_state_slots == 0)
        if slot != -1:
            before = bound.prefixes[start - 1] if start else NOTHING
            assert self.states[slot] == before, "a state is not that of the tokens before the row"
            self.states[slot] = bound.prefixes[end - 1]

    def _check_limits(self, plan: StepPlan) -> None:
        assert plan.rows or self.limits.page_tokens
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
        self.worker.disk = before.disk
        self.worker.disk.connect()
        self.scheduler.worker_ready("signal 9", crashed_by_itself=crashed_by_itself)
        self._read()

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            assert not self.dead
            assert not self.lost
            self.in_flight.append(plan)
            assert len(self.in_flight) <= MAX_PLANS_IN_FLIGHT
        self._read()
        return plan

    def result(self) -> None:
        """The worker finishes its oldest plan."""
        if self.in_flight:
            self.now += 1.0
            result = self.worker.step(self.in_flight.popleft())
            ms = self.step_ms(result)
            self.scheduler.step_result(msgspec.structs.replace(result, compute_ms=ms), self.now)
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
        running = self.scheduler.load_report().num_running
        assert running <= min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)

    def _check_events(self, size: int) -> None:
        """The subscriber has as many blocks as the prefix tree has whole ones. (Which: `test_block_log.py`.)"""
        self.subscriber.apply(encode_batch(0.0, self.scheduler.take_kv_events(), as_maps=True))
        nodes = self.scheduler._memory._tree._nodes()
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
