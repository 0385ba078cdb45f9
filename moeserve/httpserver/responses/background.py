"""Responses that are made in the background: their tasks and their events.

A run belongs to no connection. Its response is in the store from the beginning, as queued. If the server ends before
the run, the next server with the same --data-dir finds the response in the store and reports it as failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Final, Literal

from moeserve.httpserver.generation.prepared import PreparedRequest
from moeserve.httpserver.responses.handler import ResponsesHandler
from moeserve.httpserver.responses.kept_events import EventMemory, KeptEvents
from moeserve.httpserver.responses.objects import ResponseEvent, ResponseObject
from moeserve.httpserver.responses.store import ResponseStore
from moeserve.httpserver.responses.writer import ItemWriter
from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.refusal import Refusal

log = logging.getLogger(__name__)

MAX_RUNS: Final = 256  # the most runs that have not ended
MAX_RUNS_OF_KEY: Final = 64
# How long events are kept after the response has ended; OpenAI keeps them for five minutes.
KEPT_S: Final = 600.0


class Run:
    """One response, from its beginning until its events are forgotten. Written by `BackgroundResponses`."""

    def __init__(self, handler: ResponsesHandler, events: KeptEvents) -> None:
        self.handler = handler
        self.owner = handler.caller.key_owner
        self.response: ResponseObject = handler.begun("queued")
        self.writer = ItemWriter(handler.body.toolbox, encrypt=handler.body.wants_encrypted_reasoning)
        self.kept = events
        self.ended_at: float | None = None  # time.monotonic()
        self.is_cancelled = False
        self.task: asyncio.Task[None] | None = None

    def events(self, starting_after: int = -1) -> AsyncGenerator[ResponseEvent, None]:
        """See `KeptEvents.after`."""
        return self.kept.after(starting_after)


class BackgroundResponses:
    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._memory = EventMemory()
        self._runs: dict[str, Run] = {}

    def find(self, owner: str, response_id: str) -> Run | None:
        """Returns a run whose response has not ended or whose events are kept; None if there is no such run."""
        self._forget_old()
        run = self._runs.get(response_id)
        return run if run is not None and run.owner == owner else None

    async def begin(self, handler: ResponsesHandler) -> Run:
        """Begins a run. Returns when its response is in the store. Raises ApiError, as for a response that the client
        waits for."""
        self._forget_old()
        self._check_room(handler.caller.key_owner)
        admit = handler.caller.admit
        # `admit` is called below and not by the engine: when the request reaches the engine, its connection may have
        # other requests.
        handler.caller = replace(handler.caller, admit=lambda: None)
        run = self._runs[handler.id] = Run(handler, self._memory.open())
        try:
            prepared = await handler.prepare()
            await self._store.begin(handler.stored(run.response))
        except BaseException:
            self._drop(run)
            raise
        admit()
        run.task = asyncio.create_task(self._make(run, prepared))
        return run

    async def cancel(self, run: Run) -> ResponseObject:
        """Ends the response as cancelled, unless it has ended already. Returns the response."""
        if run.task is not None and run.ended_at is None:
            if not run.is_cancelled:
                run.is_cancelled = True
                run.task.cancel()
            await asyncio.wait({run.task})
        return run.response

    async def forget(self, run: Run) -> None:
        """Forgets a run, and cancels it if it has not ended."""
        await self.cancel(run)
        self._drop(run)

    async def finish(self) -> None:
        """Waits until all responses have ended."""
        if tasks := [run.task for run in self._runs.values() if run.task is not None]:
            await asyncio.wait(tasks)

    def _check_room(self, owner: str) -> None:
        going = [run for run in self._runs.values() if run.ended_at is None]
        mine = sum(run.owner == owner for run in going)
        if mine < MAX_RUNS_OF_KEY and len(going) < MAX_RUNS:
            return
        whose = f"{mine} background responses of this API key" if mine >= MAX_RUNS_OF_KEY else f"{len(going)}"
        message = f"{whose} have not ended yet; wait for one, or cancel one"
        raise ApiError(429, message, code="too_many_background_responses", refusal=Refusal.QUOTA)

    async def _make(self, run: Run, prepared: PreparedRequest) -> None:
        try:
            async with aclosing(run.handler.events_of(prepared, run.writer)) as events:
                async for event in events:
                    self._take(run, event)
        except asyncio.CancelledError:
            if not run.is_cancelled:
                raise
            await self._end(run, "cancelled", None)
        except Exception:
            log.exception("the background response %s failed", run.handler.id)
            error = ApiError(500, "internal error; the server's log has the cause", code="internal_error")
            await self._end(run, "failed", error)
        finally:
            run.ended_at = time.monotonic()
            run.kept.end()
            about = run.response["status"], run.handler.caller.record.text()
            log.info("background response %s: %s; %s", run.handler.id, *about)

    async def _end(self, run: Run, status: Literal["cancelled", "failed"], error: ApiError | None) -> None:
        for event in run.writer.close("incomplete"):
            self._take(run, event)
        response = run.handler.ended(run.writer, status, error)
        await run.handler.store_response(response)
        self._take(run, run.writer.event(f"response.{status}", response=response))

    def _take(self, run: Run, event: ResponseEvent) -> None:
        if "response" in event:
            run.response = event["response"]
        self._memory.add(run.kept, event)

    def _forget_old(self) -> None:
        until = time.monotonic() - KEPT_S
        for run in list(self._runs.values()):
            if run.ended_at is not None and run.ended_at < until:
                self._drop(run)

    def _drop(self, run: Run) -> None:
        self._runs.pop(run.handler.id, None)
        self._memory.close(run.kept)
