"""The LoRA adapters that requests may name, and the loads and unloads that are in progress."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from moeserve.httpserver.transport.errors import ApiError, invalid
from moeserve.messages.adapters import AdapterAnswer, LoadAdapter, ServedAdapter, UnloadAdapter
from moeserve.messages.async_channels import AsyncPushChannel
from moeserve.messages.channels import ChannelFull

TIMEOUT_S: Final = 600.0  # enough for a large adapter on a slow disk; a load that takes longer continues


class ServedAdapters:
    """The adapters that the router has reported. `EngineClient` calls `told`, `received` and `failed`, the routes call
    the other methods; all on one event loop."""

    def __init__(self, to_router: AsyncPushChannel, next_ticket: Callable[[], int]) -> None:
        self._to_router = to_router
        self._next_ticket = next_ticket
        self._waiting: dict[int, asyncio.Future[AdapterAnswer]] = {}  # by ticket
        self.by_name: Mapping[str, ServedAdapter] = {}

    def told(self, adapters: Iterable[ServedAdapter]) -> None:
        self.by_name = {adapter.name: adapter for adapter in adapters}

    def received(self, answer: AdapterAnswer) -> None:
        waiting = self._waiting.pop(answer.ticket, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def failed(self, cause: str) -> None:
        """Fails the waiting loads and unloads, because the router is lost."""
        for ticket in list(self._waiting):
            self.received(AdapterAnswer(ticket, 503, f"the engine was restarted meanwhile: {cause}"))

    async def load(self, name: str, path: Path, *, replaces: bool) -> str:
        """Loads an adapter. Returns a sentence for the client once requests may name the adapter. Raises ApiError with
        the status of the router's answer, such as 400 for files that cannot be served; 503 if the engine does not
        answer or is restarted."""
        return await self._ask(LoadAdapter(self._next_ticket(), name, os.fspath(path), replaces))

    async def unload(self, name: str) -> str:
        """Unloads an adapter. Returns a sentence for the client once no request may name the adapter. Raises
        ApiError with the status of the router's answer, such as 404 for an unknown adapter; 503 as `load`."""
        return await self._ask(UnloadAdapter(self._next_ticket(), name))

    async def _ask(self, order: LoadAdapter | UnloadAdapter) -> str:
        waiting: asyncio.Future[AdapterAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[order.ticket] = waiting
        try:
            await self._to_router.send(order)
            async with asyncio.timeout(TIMEOUT_S):
                answer = await waiting
        except (TimeoutError, ChannelFull) as error:
            raise ApiError(
                503, "the engine does not answer at the moment; try again in a few seconds", code="overloaded"
            ) from error
        finally:
            self._waiting.pop(order.ticket, None)
        if answer.status != 200:
            raise ApiError(answer.status, answer.message, param="lora_name" if answer.status == 404 else None)
        return answer.message


def path_within(directory: str, path: str) -> Path:
    """Returns the file or folder `path`, relative to `directory` or absolute, as an absolute path without links. Raises
    ApiError: 400 for a path outside `directory`, whether it exists or not; 404 for a missing one."""
    try:
        found = Path(os.path.realpath(Path(directory, path)))
    except (OSError, ValueError) as error:  # a null byte, a loop of links
        raise invalid("lora_path", "is no path") from error
    if not found.is_relative_to(directory):
        raise invalid(
            "lora_path", "is not within the folder of --lora-dir; copy it there, or correct the path"
        )
    if not os.path.exists(found):  # also a path that the system refuses, such as a name that is too long
        raise ApiError(
            404,
            f"lora_path: there is no {path[:500]!r} in the folder of --lora-dir; copy it there, or correct the "
            "path",
            param="lora_path",
        )
    return found
