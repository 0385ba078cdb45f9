"""The real scheduler and the real engine, threads and files, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import StepResult
from moeserve.router.core.limits import Limits
from moeserve.worker.runner import Runner
from tests.support.router.router_world import World, request


class RealTimeWorld(World):
    """A world whose seconds and whose steps are real; `step_ms` may tell another duration of theirs."""

    def __init__(
        self,
        runner: Runner,
        step_ms: Callable[[StepResult], float] = lambda result: result.compute_ms,
        num_kv_slots: int | None = None,
    ) -> None:
        """num_kv_slots: of those that the worker has; None: all."""
        ready = runner.ready()
        limits = Limits(
            num_kv_slots=num_kv_slots or ready.num_kv_slots,
            max_num_seqs=ready.max_num_seqs,
            max_model_len=ready.max_model_len,
            max_num_batched_tokens=64,
            max_num_queued_reqs=100,
            num_state_slots=ready.num_state_slots,
            state_bytes=ready.state_bytes,
            page_tokens=ready.kv_page_tokens,
            page_bytes=ready.kv_page_bytes,
            page_write_bytes=ready.kv_write_bytes,
            tiers=tuple(ready.kv_tiers),
            embedding_bytes=4 * ready.embedding_size,
        )
        super().__init__(limits, step_ms)
        self.worker = runner  # type: ignore[assignment]

    def turn(self) -> None:
        while self.plan() is not None:
            pass
        self.now = time.monotonic() - 1.0  # a result adds a second
        self.result()

    def ask(self, id: int, tokens: list[int], max_tokens: int = 4) -> None:
        greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.add(msgspec.structs.replace(request(id, tokens, max_tokens), sampling=greedy))

    def finish(self) -> None:
        """All answers, and all that the tiers have to do."""
        while self.in_flight or not self.scheduler.is_idle or self.scheduler._memory.has_work:
            self.turn()
