"""The scheduler on a worker that computes nothing but the time: what a router does in minutes, in a second."""

from __future__ import annotations

import itertools
import random
from array import array
from collections import deque
from dataclasses import dataclass, field

from moeserve.messages.schema import GenerateRequest, TokensOut
from moeserve.messages.steps import Sampled, StepPlan, StepResult
from moeserve.router.core.limits import Limits
from moeserve.router.core.scheduler import Scheduler
from tests.support.router.checking_worker import STOP_TOKEN

NUM_EXPERTS, EXPERTS_PER_TOKEN = 128, 8


@dataclass(frozen=True)
class Step:
    end: float  # seconds
    decode_rows: int
    prompt_tokens: int
    ms: float


@dataclass
class Stream:
    """What the client of one request sees; seconds."""

    sent: float
    tokens: array[float] = field(default_factory=lambda: array("d"))
    ended: float | None = None

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.sent

    def gaps(self, start: float, end: float) -> list[float]:
        """Between tokens, of those within the stretch, in order of size."""
        times = [t for t in self.tokens if start <= t <= end]
        return sorted(b - a for a, b in itertools.pairwise(times))


class VirtualEngine:
    """Step times as a two-core CPU has them with the 12-layer file: reading weights, then computing; 5% noise."""

    def __init__(self, **limits: object) -> None:
        defaults = {
            "num_kv_slots": 100_000,
            "max_num_seqs": 64,
            "max_model_len": 50_000,
            "max_num_batched_tokens": 512,
            "max_num_queued_reqs": 1000,
            "num_experts": NUM_EXPERTS,
            "experts_per_token": EXPERTS_PER_TOKEN,
        }
        self.scheduler = Scheduler(Limits(**(defaults | limits)))  # type: ignore[arg-type]
        self.now = 0.0
        self.steps: list[Step] = []
        self.streams: dict[int, Stream] = {}
        self._lengths: dict[int, int] = {}  # answers that end by themselves, with a stop token
        self._rng = random.Random(0)
        self._in_flight: deque[StepPlan] = deque()
        self._bound: dict[int, tuple[int, int]] = {}  # request slot -> (id, prompt length)

    def send(self, message: GenerateRequest, length: int | None = None) -> Stream:
        """A request, now. `message.arrival` must be the engine's time."""
        assert message.arrival == self.now
        if length is not None:
            self._lengths[message.id] = length
        stream = self.streams[message.id] = Stream(self.now)
        self.scheduler.add(message)
        return stream

    def turn(self) -> bool:
        """Plans what can be planned and finishes the oldest step. False when there is none."""
        while (plan := self.scheduler.plan(self.now)) is not None:
            self._in_flight.append(plan)
        if not self._in_flight:
            return False
        plan = self._in_flight.popleft()
        for new in plan.new_seqs:
            self._bound[new.req_slot] = (new.sampling.seed, new.num_prompt)
        ms = self._step_ms(plan)
        self.now += ms / 1e3
        sampled = [
            Sampled(self._token(row.req_slot, row.start + row.count)) for row in plan.rows if row.sample
        ]
        self.scheduler.step_result(StepResult(plan.step, sampled, {}, ms, 0.0), self.now)
        for message in self.scheduler.take_messages():
            for item in message.items if isinstance(message, TokensOut) else ():
                stream = self.streams[item.id]
                stream.tokens.extend([self.now] * len(item.token_ids))
                if item.finish_reason is not None:
                    stream.ended = self.now
        return True

    def run(self, until: float | None = None) -> None:
        """Until nothing is left to do, or the time has come."""
        while (until is None or self.now < until) and self.turn():
            pass

    def _token(self, req_slot: int, position: int) -> int:
        id, prompt = self._bound[req_slot]
        return STOP_TOKEN if position - prompt + 1 == self._lengths.get(id) else 7

    def _step_ms(self, plan: StepPlan) -> float:
        decode = [row for row in plan.rows if row.count == 1 and row.sample]
        prompt = sum(row.count for row in plan.rows) - len(decode)
        attended = sum((row.start + row.count / 2) * row.count for row in plan.rows)
        ms = self._ms(len(decode), prompt, attended) * self._rng.lognormvariate(0.0, 0.05)
        self.steps.append(Step(self.now + ms / 1e3, len(decode), prompt, ms))
        return ms

    def _ms(self, decode_rows: int, prompt_tokens: int, attended: float) -> float:
        experts = experts_read(decode_rows + prompt_tokens)
        return 7.5 + 84.0 * experts + 0.05 * decode_rows + 1.25 * prompt_tokens + 2.3e-4 * attended


class StreamingEngine(VirtualEngine):
    """A GPU with half of 48 x 128 experts in RAM, as it was measured: the pool reads what a step misses at 20 us an
    expert; a large step brings all of them over PCIe, in 190 ms whatever its size, and computes 21,000 tokens a
    second."""

    def _ms(self, decode_rows: int, prompt_tokens: int, attended: float) -> float:
        by_pool = 2.0 + 48 * 64 * 0.02 * experts_read(decode_rows + prompt_tokens) + 0.35 * prompt_tokens
        if not prompt_tokens:
            return by_pool
        return 10.0 + min(by_pool + 10.0, max(190.0, 0.047 * prompt_tokens))


def experts_read(tokens: int) -> float:
    """The part of a layer's that so many tokens are routed to, if all are as likely."""
    return 1.0 - (1.0 - EXPERTS_PER_TOKEN / NUM_EXPERTS) ** tokens
