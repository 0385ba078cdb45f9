"""Sends a workload's requests to a server at their times, but at most `max_concurrency` at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from moeserve.cli.bench.client import Client
from moeserve.cli.bench.prompts import Writer
from moeserve.cli.workload.metrics import Outcome
from moeserve.cli.workload.trace import Session, Workload


@dataclass(frozen=True, slots=True)
class Run:
    outcomes: list[Outcome]  # in the order in which the requests ended
    duration: float  # seconds from the start to the last answer's end
    cpu: float  # CPU seconds of this process meanwhile


class Load:
    def __init__(
        self,
        client: Client,
        workload: Workload,
        writer: Writer,
        max_concurrency: int | None,
        on_end: Callable[[], object],
    ) -> None:
        """on_end: called when a request ends."""
        self._client = client
        self._workload = workload
        self._writer = writer
        self._outcomes: list[Outcome] = []
        self._on_end = on_end
        # asyncio's semaphore wakes its waiters in order: first come, first served.
        self._place: AbstractAsyncContextManager[object] = (
            nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        )

    async def run(self) -> Run:
        cpu = time.process_time()
        self._client.start_clock()
        async with asyncio.TaskGroup() as tasks:
            for number, session in enumerate(self._workload.sessions):
                await self._sleep_until(session.arrival)
                tasks.create_task(self._play(session, number))
        return Run(self._outcomes, self._client.now(), time.process_time() - cpu)

    async def _play(self, session: Session, number: int) -> None:
        """Plays one session's turns. A failed turn ends the session, because the next prompt would need its answer."""
        prompts = self._writer(number)
        length = session.prefix_len
        ended = 0.0
        for place, turn in enumerate(session.turns):
            await self._sleep_until(max(turn.not_before, ended + turn.think))
            length += turn.input_len
            async with self._place:
                body = prompts.body(place) | {"max_tokens": turn.output_len}
                answer = await self._client.ask(body, length)
            ended = self._client.now()
            self._end(answer.outcome)
            if answer.outcome.error:
                for skipped in session.turns[place + 1 :]:
                    self._end(Outcome(ended, skipped.input_len, error="not sent: the turn before failed"))
                return
            prompts.answered(answer)
            length += answer.outcome.output_len

    def _end(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._on_end()

    async def _sleep_until(self, when: float) -> None:
        wait = when - self._client.now()
        if wait > 0:
            await asyncio.sleep(wait)
