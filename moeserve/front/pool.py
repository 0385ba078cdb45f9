"""The models of one front, for requests: finds models by name, waits for them, leases them, and loads and unloads them
on request."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import count
from typing import Final

from moeserve.front.config import ServedModel
from moeserve.front.lives import ModelLives
from moeserve.front.memory import Held, Memory
from moeserve.front.pooled_model import Instance, LoadFailed, PooledModel, Surroundings, Ticket
from moeserve.front.schedule import State
from moeserve.httpserver.transport.errors import ApiError, shutting_down
from moeserve.messages.refusal import Refusal

BACK_LOOK_S: Final = 0.05  # between two looks at whether a server takes requests again

log = logging.getLogger(__name__)


class ModelPool(ModelLives):
    def __init__(
        self,
        models: Iterable[ServedModel],
        surroundings: Surroundings,
        budget: Memory,
        *,
        load_timeout: float,
        idle_limit: float | None,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """load_timeout: seconds that a request waits for its model. idle_limit: seconds without a request after which a
        model is unloaded; None: never. max_waiting: the most requests that may wait, all models together."""
        super().__init__(surroundings, budget, clock)
        self._by_name: dict[str, PooledModel] = {}
        self._places = count()  # numbers for the models' folders; a removed model's number is not used again
        self._load_timeout = load_timeout
        self._idle_limit = idle_limit
        self._max_waiting = max_waiting
        self._is_leaving = False  # another server takes the new requests
        self.on_pinned_lost = self._load_pinned
        for served in models:
            self.add(served)

    # ------------------------------------------------------------ which there are

    def add(self, served: ServedModel) -> PooledModel:
        """Adds a model, not loaded, at the end of the list."""
        model = PooledModel(
            served.name,
            served.is_pinned,
            served=served,
            place=next(self._places),
            idle_limit=self._idle_limit,
            usual_idle_limit=self._idle_limit,
        )
        self.models.append(model)
        self._by_name |= dict.fromkeys(served.names, model)
        return model

    def remove(self, name: str) -> None:
        """Removes a model. New and waiting requests for it get a 404; running requests end before the model's server
        does."""
        model = self._by_name[name]
        for one in model.names:
            del self._by_name[one]
        model.is_removed = True
        model.refuse_waiting(self._unknown(name))
        if model.state is State.UNLOADED:
            self.models.remove(model)
        elif model.state is State.LOADING:
            self.stop(model)
        else:
            model.is_unload_wanted = True
        self.turn()

    def set_adapters(self, model: PooledModel, names: Iterable[str]) -> None:
        """Replaces the names of the model's loaded adapters. A name that another model has still means that other
        model."""
        for name in model.adapters:
            del self._by_name[name]
        model.adapters = ()
        if not model.is_removed:
            model.adapters = tuple(name for name in names if name not in self._by_name)
            self._by_name |= dict.fromkeys(model.adapters, model)

    def has(self, name: str) -> bool:
        return name in self._by_name

    @property
    def listed(self) -> list[PooledModel]:
        """Returns the models that requests can name."""
        return [model for model in self.models if not model.is_removed]

    # ------------------------------------------------------------ looked up

    def find(self, name: str | None) -> PooledModel:
        """Returns the model of this name; the first model for None. Raises ApiError 404."""
        if name is None:
            return self.models[0]
        model = self._by_name.get(name)
        if model is None:
            raise self._unknown(name)
        return model

    def _unknown(self, name: str) -> ApiError:
        served = ", ".join(repr(model.name) for model in self.listed)
        message = f"the model {name[:200]!r} does not exist; served are {served}"
        return ApiError(404, message, param="model", code="model_not_found")

    @property
    def num_running(self) -> int:
        return sum(model.running for model in self.models)

    @property
    def num_waiting(self) -> int:
        return sum(len(model.tickets) for model in self.models)

    # ------------------------------------------------------------ requests

    @asynccontextmanager
    async def lease(self, model: PooledModel) -> AsyncIterator[Instance]:
        """Waits until the model is loaded, and yields the model's server for one request. The model is not unloaded
        meanwhile. Raises ApiError if the model cannot be loaded, or not in time."""
        instance = await self.acquire(model)
        try:
            yield instance
        finally:
            self.release(model, instance)

    @asynccontextmanager
    async def lease_loaded(self, model: PooledModel) -> AsyncIterator[Instance]:
        """Yields the server of a model that is loaded now. The request does not count as a use that keeps the model
        loaded, but an unload waits for the request's end. Raises ApiError 503 if the model is not loaded."""
        if not model.answers_questions:
            message = (
                f"the model {model.name!r} is not loaded; a completion request or POST /models/load loads it"
            )
            raise ApiError(503, message, code="model_not_loaded", refusal=Refusal.LOADING)
        instance, idle_since = model.instance, model.idle_since
        assert instance is not None
        model.running += 1
        try:
            yield instance
        finally:
            self.release(model, instance)
            model.idle_since = idle_since
            self.turn()

    async def acquire(self, model: PooledModel) -> Instance:
        """Does the same as `lease`, but the caller must call `release`."""
        await self.refuse_if_hopeless(model)
        if model.state is State.LOADED and not model.tickets and not model.is_unload_wanted:
            assert model.instance is not None
            model.running += 1
            return model.instance
        if self.num_waiting >= self._max_waiting:
            message = f"{self._max_waiting} requests wait for their models, as many as may; try again later"
            raise ApiError(503, message, code="overloaded", refusal=Refusal.QUEUE_FULL)
        ticket = Ticket(asyncio.get_running_loop().create_future(), self.now, self.num_swaps)
        model.tickets.append(ticket)
        self.look_at_file(model)
        self.turn()
        try:
            async with asyncio.timeout(self._load_timeout):
                try:
                    return await ticket.future
                except asyncio.CancelledError:  # a timeout cancels too
                    if ticket.has_instance:
                        self.release(model, ticket.future.result())
                    raise
        except TimeoutError:
            raise self._not_in_time(model) from None
        finally:
            if ticket in model.tickets:
                model.tickets.remove(ticket)
                self.turn()

    async def until_back(self, model: PooledModel, instance: Instance) -> None:
        """Waits until a server that has cut a request takes requests again, because its launcher has replaced a part of
        it, or until it has ended. Raises ApiError 503 if neither comes within a load's time."""
        deadline = self.now + self._load_timeout
        while model.instance is instance and not await instance.is_ready():
            if self.now >= deadline:
                raise self._not_in_time(model)
            await asyncio.sleep(BACK_LOOK_S)

    def hold(self, model: PooledModel, instance: Instance, work: Awaitable[None]) -> None:
        """Counts `work` as a running request of the model's server until `work` has ended. Call it within a lease."""
        model.running += 1
        self.task(self._held(model, instance, work))

    async def _held(self, model: PooledModel, instance: Instance, work: Awaitable[None]) -> None:
        try:
            await work
        finally:
            self.release(model, instance)

    def release(self, model: PooledModel, instance: Instance) -> None:
        if model.instance is instance:  # otherwise another server has replaced it
            model.running -= 1
            model.idle_since = self.now
        self.turn()

    def keep(self, model: PooledModel, seconds: float | None) -> None:
        """Sets how many seconds the loaded model stays loaded without requests, as a request of its asks. inf: for
        ever; None: the server's option. It counts until the model is unloaded."""
        if self._is_leaving:
            return
        if seconds is None:
            model.idle_limit = model.usual_idle_limit
        else:
            model.idle_limit = None if seconds == math.inf else seconds

    def unload(self, model: PooledModel) -> None:
        """Unloads a model when its running requests have ended; new requests load it again. A model that is loading is
        stopped at once. Raises ApiError 400 if the model is not loaded."""
        if model.state is State.LOADING:
            message = f"the load of {model.name!r} was ended by a request"
            model.refuse_waiting(ApiError(503, message, code="model_loading"))
            self.stop(model)
        elif model.state is State.LOADED:
            model.is_unload_wanted = True
            self.turn()
        else:
            message = f"the model {model.name!r} is not loaded"
            raise ApiError(400, message, param="model", code="model_not_loaded")

    async def load(self, model: PooledModel, *, again: bool = True) -> None:
        """Begins to load a model, as for a request. again: do not wait after a failed load. Raises ApiError if the
        model cannot be loaded."""
        if again:
            model.retry_at = 0.0
        await self.refuse_if_hopeless(model)
        self.task(self._loaded_once(model))

    async def _loaded_once(self, model: PooledModel) -> None:
        try:
            async with self.lease(model):
                pass
        except ApiError as error:
            log.warning("%s", error.message)

    async def refuse_if_hopeless(self, model: PooledModel) -> None:
        """Raises ApiError if waiting for the model would not help."""
        if model.failure and model.state in (State.UNLOADED, State.STOPPING):
            has_changed = await self._has_changed(model)
            if model.failure and has_changed:
                model.forget_failure()
        if self.is_draining:
            raise shutting_down()
        if model.is_removed:
            raise self._unknown(model.name)
        if model.state in (State.UNLOADED, State.STOPPING) and (
            model.is_too_large or model.retry_at > self.now
        ):
            raise model.cannot_be_loaded(self.now)

    async def _has_changed(self, model: PooledModel) -> bool:
        """Returns whether the model's file is another one than that which could not be loaded."""
        try:
            return bool(await self.surroundings.signature(model) != model.signature)
        except LoadFailed:  # the file cannot be looked at
            return False

    def _not_in_time(self, model: PooledModel) -> ApiError:
        doing = model.progress_text
        message = f"the model {model.name!r} was not loaded within {self._load_timeout:g} s ({doing}); try again later"
        return ApiError(503, message, code="model_loading", refusal=Refusal.LOADING)

    async def measure_all(self) -> None:
        """Measures each model's memory needs, and loads the pinned models."""
        for model in self.listed:
            await self.measure(model)
            if model.is_pinned:
                await self._load_pinned(model)

    async def _load_pinned(self, model: PooledModel) -> None:
        try:
            await self.load(model, again=False)
        except ApiError as error:
            log.error("%s", error.message)

    # ------------------------------------------------------------ the end

    @property
    def is_ending(self) -> bool:
        return self.is_draining or self._is_leaving

    def leave(self) -> None:
        """Unloads each model as soon as it has no requests. Another server takes the new requests and needs the
        memory."""
        self._is_leaving = True
        for model in self.models:
            model.is_pinned = False
            model.idle_limit = model.usual_idle_limit = 0.0
        self.turn()

    @property
    def held(self) -> Held | None:
        """Returns the memory that the models hold plus the memory for requests that wait here; None while that is not
        known. For the server after this one, in an upgrade."""
        memory, folders = self.memory_used(), frozenset[str]()
        for model in self.models:
            is_wanted = bool(model.tickets) and not model.is_removed
            if model.state is State.UNLOADED and is_wanted and not model.is_too_large:
                if model.need is None:
                    return None
                memory = memory.plus(model.need)
            if model.state is not State.UNLOADED or is_wanted:
                folders |= model.served.folders
        has_begun = self.may_load.is_set()
        gpus = list(self.budget.gpus) or None
        return Held(memory, folders, self.budget.ram if has_begun else None, gpus)

    async def drain(self, timeout: float) -> None:
        """Refuses new requests, and waits at most `timeout` seconds for the running and waiting ones."""
        self.is_draining = True
        for model in self.models:
            if model.state is not State.LOADED:
                model.refuse_waiting(shutting_down())
        deadline = self.now + timeout
        while self.num_running and (left := deadline - self.now) > 0:
            await asyncio.sleep(min(left, 0.02))
