"""The lives of models' servers: a model is measured and loaded, serves, and is stopped.

This module runs on the event loop's thread. `schedule.py` decides, and this module carries the decisions out. Each life
is one task (`_live`). Requests use `pool.py`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from moeserve.front.gpus import GpuUse, choose_gpus, on_gpus
from moeserve.front.memory import Memory
from moeserve.front.pooled_model import (
    Instance,
    LoadFailed,
    Needs,
    PooledModel,
    Surroundings,
    errors_as_failures,
)
from moeserve.front.schedule import MIN_TURN_S, Moves, ScheduledModel, State, decide, room_beside_pinned
from moeserve.httpserver.transport.errors import shutting_down

LOAD_DEADLINE_S: Final = 3600.0  # after which a server that is neither ready nor ended is killed
SHORT_LIFE_S: Final = 30.0  # a server that ends by itself this soon after its load has crashed
# Crashes in a row that count as a failed load. After fewer the waiting requests get the next server at once.
MOST_CRASHES: Final = 2
UNSEEN: Final = object()  # signature of a file that could not be looked at; no look returns it

log = logging.getLogger(__name__)


class ModelLives:
    def __init__(
        self,
        surroundings: Surroundings,
        budget: Memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models: list[PooledModel] = []  # includes removed models until their servers have ended
        self.surroundings = surroundings
        self.budget = budget
        self.limit = ""  # the limit of which the budget is a share, as `limit_note` says it; "": none
        self.elsewhere = Memory(0)  # part of the budget that an earlier server of an upgrade still holds
        self._folders_elsewhere: frozenset[str] = frozenset()
        self.is_draining = False  # nothing is loaded any more
        self.num_swaps = 0  # number of loads that began
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._measuring = asyncio.Lock()
        # Not set while the earlier server may still load models; until then no model's needs are read, and no model is
        # loaded.
        self.may_load = asyncio.Event()
        self.may_load.set()
        self._is_turning = False
        # Its server ended by itself.
        self.on_pinned_lost: Callable[[PooledModel], Awaitable[None]] | None = None

    @property
    def now(self) -> float:
        """Returns the time in seconds, on the clock that all times of models use."""
        return self._clock()

    def memory_used(self) -> Memory:
        """Returns the planned memory of the models that have processes."""
        total = Memory(0)
        for model in self.models:
            if model.state is not State.UNLOADED and model.need is not None:
                total = total.plus(model.need)
        return total

    def others_hold(self, memory: Memory, folders: frozenset[str]) -> None:
        """Notes the memory and folders that an earlier server still holds. A model that needs one of the `folders`
        waits for it."""
        if (memory, folders) != (self.elsewhere, self._folders_elsewhere):
            self.elsewhere, self._folders_elsewhere = memory, folders
            self.turn()

    # ------------------------------------------------------------ what models need

    def look_at_file(self, model: PooledModel) -> None:
        """Begins to look at the file of a model that is not loaded. The model's needs are measured if they are unknown
        or the file has changed."""
        if model.state is not State.UNLOADED:
            return
        if not model.has_one_waiting:
            self.task(self.measure(model))
            return
        model.num_looks += 1  # the model is not loaded before the look has ended
        self.task(self._look_for_first(model))

    async def _look_for_first(self, model: PooledModel) -> None:
        """Looks at the model's file on behalf of the first request that waits for the model."""
        try:
            await self.measure(model)
        finally:
            model.num_looks -= 1
        if model.state is State.UNLOADED and model.needs is not None:
            model.need = self._placed(model, model.needs)  # where it is free now
        self.turn()

    async def measure(self, model: PooledModel) -> None:
        await self.may_load.wait()
        try:
            with errors_as_failures():
                signature = await self.surroundings.signature(model)
        except LoadFailed as error:
            if model.state is State.UNLOADED:
                model.signature = UNSEEN  # the next look that succeeds counts as a change
                self._failed(model, str(error))
                self.turn()
            return
        async with self._measuring:  # one process at a time
            if model.state is not State.UNLOADED or (
                model.needs is not None and signature == model.signature
            ):
                return
            model.need = model.needs = None
            if signature != model.signature:
                # Otherwise requests that come meanwhile would be refused because of the old file.
                model.forget_failure()
            model.signature = signature
            try:
                with errors_as_failures():
                    needs = await self.surroundings.measure(model)
            except LoadFailed as error:
                self._failed(model, str(error))
                self.turn()  # others may have waited for what is known now
                return
        model.complete(needs)
        self.budget = Memory(self.budget.ram, self.budget.gpus or needs.gpus_there)
        need = self._placed(model, needs)
        if need.fits(room_beside_pinned(model, self.models, self.budget)):
            model.needs, model.need = needs, need
            model.forget_failure()
        else:
            self._is_too_large(model, need)
        self.turn()

    def _placed(self, model: PooledModel, needs: Needs) -> Memory:
        """Chooses the model's GPUs, and returns its memory on them."""
        others = [
            GpuUse(other.need, other.state is not State.UNLOADED, not other.is_idle)
            for other in self.models
            if other is not model and other.need is not None
        ]
        others.append(GpuUse(self.elsewhere, is_loaded=True, is_busy=True))
        model.gpus = choose_gpus(len(needs.gpus), needs.gpu_choices, others)
        return on_gpus(needs.memory.ram, needs.gpus, model.gpus)

    def _is_too_large(self, model: PooledModel, need: Memory) -> None:
        room = room_beside_pinned(model, self.models, self.budget)
        model.note_too_large(need, room, self.limit, is_beside_pinned=room != self.budget)
        log.error("%s: %s", model.name, model.failure)
        model.refuse_waiting(model.cannot_be_loaded(self.now))

    # ------------------------------------------------------------ lives

    def turn(self) -> None:
        """Carries out the moves that are due now. Called whenever something has changed."""
        if self._is_turning:
            return
        self._is_turning = True
        try:
            while self._admit() or self._take(self._moves()):
                pass
        finally:
            self._is_turning = False

    def _moves(self) -> Moves:
        return decide(self._scheduled(), self.budget.minus(self.elsewhere), self._clock())

    def _scheduled(self) -> list[PooledModel]:
        for model in self.models:
            model.is_held_elsewhere = not self._folders_elsewhere.isdisjoint(model.served.folders)
            model.waiting_since = model.tickets[0].came if model.tickets else None
            model.lines_since = model.line_tickets[0].came if model.line_tickets else None
        return self.models

    def _admit(self) -> bool:
        """Lets requests and lines of batches begin that wait for loaded models. Returns whether any began."""
        begun = False
        for model in self.models:
            while model.state is State.LOADED and model.tickets and not model.is_unload_wanted:
                ticket = model.tickets.popleft()
                if ticket.future.done():
                    continue
                assert model.instance is not None
                begun = True
                model.running += 1
                model.wait_seconds += self._clock() - ticket.came
                ticket.future.set_result(model.instance)
            while model.state is State.LOADED and model.line_tickets and not model.is_unload_wanted:
                ticket = model.line_tickets.popleft()
                if not ticket.future.done():
                    assert model.instance is not None
                    begun = True
                    model.num_lines += 1
                    ticket.future.set_result(model.instance)
        return begun

    def _take(self, moves: Moves) -> bool:
        """Carries out the moves. Returns whether there were any."""
        for model in moves.reopen:
            _pooled(model).state, model.makes_room = State.LOADED, False
            _pooled(model).sends_lines_back.clear()
        for model in moves.close:
            model.makes_room = True
            _pooled(model).num_evictions += 1
            log.info("%s makes room for another model; %d of its requests run", model.name, model.running)
        for model in (*moves.close, *moves.unload):
            if model.state is State.LOADING:
                log.info("%s is wanted no longer; its load ends", model.name)
                self.stop(_pooled(model))
            else:
                model.state = State.CLOSING
                _pooled(model).sends_lines_back.set()
        for model in moves.load:
            self._begin(_pooled(model))
        self._stop_closed()
        self._wake_at(moves.wake_at)
        return bool(moves)

    def _stop_closed(self) -> None:
        for model in self.models:
            if model.state is State.CLOSING and not model.running and not model.num_lines:
                self.stop(model)

    def stop(self, model: PooledModel) -> None:
        model.state = State.STOPPING
        model.stopping.set()

    def _wake_at(self, when: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when is not None:
            delay = max(0.0, when - self._clock())
            # The timer has an empty context, as in `task`, because it belongs to no request.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay, self.turn, context=contextvars.Context())

    def _begin(self, model: PooledModel) -> None:
        for ticket in model.tickets:
            model.most_swaps_waited = max(model.most_swaps_waited, self.num_swaps - ticket.swaps)
        self.num_swaps += 1
        model.state, model.stage, model.fraction = State.LOADING, "", 0.0
        model.loaded_at = model.idle_since = self._clock()
        model.stopping.clear()
        model.sends_lines_back.clear()
        model.life = self.task(self._live(model))
        used = self.memory_used()
        log.info("loading %s; with it the loaded models need %s", model.name, used.text())

    async def _live(self, model: PooledModel) -> None:
        """Runs one life of the model's server, from its start to its end."""
        try:
            with errors_as_failures():
                model.instance = instance = self.surroundings.start(model)
        except LoadFailed as error:
            model.state = State.UNLOADED
            self._failed(model, str(error))
            self.turn()
            return
        is_lost = False
        try:
            with errors_as_failures():
                if await self._until_loaded(model, instance):
                    is_lost = await self._until_over(model, instance)
        except LoadFailed as error:
            self._failed(model, str(error))
        finally:
            model.state = State.STOPPING
            model.instance, model.running, model.num_lines = None, 0, 0
            try:
                await instance.stop()
            finally:
                model.state, model.is_unload_wanted, model.makes_room = State.UNLOADED, False, False
                model.loaded_at, model.idle_limit = self._clock(), model.usual_idle_limit
                if model.is_removed:
                    self.models.remove(model)
                if (model.tickets or model.line_tickets) and not self.is_draining:
                    self.look_at_file(model)
                self.turn()
        if is_lost and model.is_pinned and not model.is_removed and self.on_pinned_lost is not None:
            await self.on_pinned_lost(model)

    async def _until_loaded(self, model: PooledModel, instance: Instance) -> bool:
        """Waits for the load. Returns False if it failed or the model is no longer wanted."""
        loading = asyncio.create_task(instance.until_ready(model.tell))
        try:
            if not await self._happens(model, loading, LOAD_DEADLINE_S):
                if not model.stopping.is_set():
                    self._failed(model, f"it was not ready after {LOAD_DEADLINE_S:g} s")
                return False
            loading.result()
        except LoadFailed as error:
            if error.is_crash:
                self._crashed(model, instance, f"its server ended during its load: {error}")
            else:
                self._failed(model, str(error))
            return False
        if model.stopping.is_set():  # it was given up at the same moment
            return False
        now = self._clock()
        model.last_load_seconds = now - model.loaded_at
        model.num_loads += 1
        model.load_seconds += model.last_load_seconds
        model.loaded_at = model.idle_since = now
        model.turn_ends = now + max(MIN_TURN_S, model.last_load_seconds)
        model.state, model.failure, model.failures = State.LOADED, "", 0
        log.info("%s is ready after %.2f s", model.name, model.last_load_seconds)
        self.turn()
        return True

    async def _until_over(self, model: PooledModel, instance: Instance) -> bool:
        """Waits until the server ends by itself, or is to be stopped. Returns whether it ended by itself."""
        ended = asyncio.create_task(instance.until_ended())
        if await self._happens(model, ended, None):
            model.num_losses += 1
            cause = ended.result()
            log.error("the server of %s has ended: %s", model.name, cause)
            if self._clock() - model.loaded_at < SHORT_LIFE_S:
                self._crashed(model, instance, f"its server has ended soon after its load: {cause}")
            else:
                model.crashes = 0
            return True
        if self._clock() - model.loaded_at >= SHORT_LIFE_S:
            model.crashes = 0
        return False

    def _crashed(self, model: PooledModel, instance: Instance, reason: str) -> None:
        # A kill from outside is not the model's fault, however often it comes.
        model.crashes += instance.died_by_itself
        if instance.died_by_itself and model.crashes >= MOST_CRASHES:
            model.failures = model.crashes - MOST_CRASHES
            self._failed(model, reason)
        else:
            log.error("%s: %s; it is loaded again at once if requests wait", model.name, reason)

    async def _happens(self, model: PooledModel, event: asyncio.Task[Any], deadline_s: float | None) -> bool:
        """Waits until `event` is set or the model must stop. Returns whether `event` is set."""
        stopping = asyncio.create_task(model.stopping.wait())
        try:
            await asyncio.wait((event, stopping), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            return event.done()
        finally:
            stopping.cancel()
            if not event.done():
                event.cancel()
                await asyncio.wait((event,))

    def _failed(self, model: PooledModel, reason: str) -> None:
        """Refuses the requests that wait for the model. New requests are then refused at once, for a time that doubles
        with each failure in a row."""
        backoff = model.note_failure(reason, self.now)
        log.error("%s cannot be loaded: %s; tried again after %g s", model.name, reason, backoff)
        model.refuse_waiting(model.cannot_be_loaded(self.now))

    # ------------------------------------------------------------ the end

    async def close(self) -> None:
        """Stops all models' servers."""
        self.is_draining = True
        if self._timer is not None:
            self._timer.cancel()
        for model in self.models:
            model.refuse_waiting(shutting_down())
            model.stopping.set()
        lives = [model.life for model in self.models if model.life is not None and not model.life.done()]
        if lives:
            await asyncio.wait(lives)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def task(self, work: Any) -> asyncio.Task[None]:
        # The task has an empty context: its log lines must not carry the id of the request that caused it.
        task: asyncio.Task[None] = asyncio.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the front ended by an error", exc_info=error)


def _pooled(model: ScheduledModel) -> PooledModel:
    assert isinstance(model, PooledModel)
    return model
