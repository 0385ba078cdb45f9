"""AdapterRegistry: the list of LoRA adapters. The router owns the list; httpserver and the worker receive its
changes.

The list survives the router: a file in the runtime directory records the served adapters and the adapters that open
requests use. A restarted router reads it, and so does the next server of an upgrade. A restarted worker receives the
whole list before its first plan.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from moeserve.messages.adapters import (
    AdapterAnswer,
    AdapterSource,
    AdaptersReport,
    AdaptersServed,
    AdapterState,
    AdaptersWanted,
    LoadAdapter,
    SavedAdapter,
    ServedAdapter,
    UnloadAdapter,
)
from moeserve.messages.steps import WorkerReady

log = logging.getLogger(__name__)

LOOK_S = 0.02  # interval at which a worker that is reading an adapter is asked for its state
# time for which a restarted router keeps adapters without requests, until clients have sent their requests again
LINGER_S = 10.0


class _Entry(msgspec.Struct):
    name: str
    path: str
    key: str
    is_served: bool = True  # False: only requests that already use it may continue
    order: int = -1
    num_bytes: int = 0
    is_there: bool = False  # the worker has loaded it


class AdapterRegistry:
    """Keeps the list of LoRA adapters. The caller sends what `due` returns to the worker, and what `take_messages`
    returns to httpserver. All times are seconds of the caller's clock."""

    def __init__(
        self,
        ready: WorkerReady,
        paths: Mapping[str, str],
        file: Path | None = None,
        most: int = 0,
        now: float = 0.0,
    ) -> None:
        """ready: the worker's message; it lists the adapters that the worker loads at its start. paths: their files, by
        name. file: where the list is stored; None if adapters cannot be added or removed. most: maximum number of
        adapters that are loaded at once."""
        self._file = file
        self._most = most
        self._orders = 0
        self._entries = [
            _Entry(name, paths.get(name, ""), key, num_bytes=ready.adapter_bytes.get(key, 0))
            for name, key in ready.adapters.items()
        ]
        self._loads: dict[int, LoadAdapter] = {}  # order → request to load
        self._failed: list[tuple[str, str]] = []  # (key, cause) of adapters that could not be restored
        self._out: list[AdaptersServed | AdapterAnswer] = []
        self._linger_until = 0.0
        self._is_awaited = False  # the worker owes a report
        self._is_news = False  # the list changed since the worker was last told
        self._next_look = 0.0
        saved = _read(file)
        if saved is not None:
            self._entries = [_Entry(one.name, one.path, one.key, one.is_served) for one in saved]
            self._linger_until = now + LINGER_S
        for entry in self._entries:
            entry.order = self._next_order()
        self.worker_found(ready)

    # ---------------------------------------------------------------- what httpserver asks for

    def load(self, message: LoadAdapter) -> None:
        """Starts to load an adapter. The answer follows when the worker has loaded it or failed."""
        refusal = self._refusal(message)
        if refusal is not None:
            self._answer(message, 400, refusal)
            return
        self._loads[self._next_order()] = message
        self._is_news = True

    def _refusal(self, message: LoadAdapter) -> str | None:
        if self._file is None:
            return "adapters cannot be loaded while this server runs"
        if any(load.name == message.name for load in self._loads.values()):
            return f"The lora adapter '{message.name}' is being loaded."
        if self._served(message.name) is not None and not message.replaces:
            return (
                f"The lora adapter '{message.name}' has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True."
            )
        if len({entry.key for entry in self._entries}) + len(self._loads) >= self._most:
            return (
                f"there are {self._most} adapters, as many as --max-loras allows (those count, too, that running "
                "requests still have after an unload): unload one first"
            )
        return None

    def unload(self, message: UnloadAdapter) -> None:
        entry = self._served(message.name)
        if self._file is None or entry is None:
            self._answer(message, 404, f"The lora adapter '{message.name}' cannot be found.")
            return
        entry.is_served = False
        self._changed()
        self._answer(message, 200, f"Success: LoRA adapter '{message.name}' removed successfully.")

    def _answer(self, message: LoadAdapter | UnloadAdapter, status: int, text: str) -> None:
        self._out.append(AdapterAnswer(message.ticket, status, text))

    # ---------------------------------------------------------------- adapters in the worker

    def due(self, now: float, in_use: Callable[[], Collection[str]]) -> AdaptersWanted | None:
        """Returns the list to send to the worker now; None if it is up to date. in_use: keys of open requests'
        adapters."""
        if self._file is None or self._is_awaited:
            return None
        self._drop_unused(now, in_use)
        if not self._is_news and not (self.is_waiting and now >= self._next_look):
            return None
        self._is_news, self._is_awaited, self._next_look = False, True, now + LOOK_S
        kept = [AdapterSource(entry.order, entry.name, entry.path, entry.key) for entry in self._entries]
        return AdaptersWanted(
            [*kept, *(AdapterSource(order, load.name, load.path) for order, load in self._loads.items())]
        )

    def _drop_unused(self, now: float, in_use: Callable[[], Collection[str]]) -> None:
        if now < self._linger_until or all(entry.is_served for entry in self._entries):
            return
        needed = set(in_use()) - {entry.key for entry in self._entries if entry.is_served}
        kept = [entry for entry in self._entries if entry.is_served or entry.key in needed]
        if len(kept) < len(self._entries):
            self._entries = kept
            self._is_news = True
            self._save()

    def report(self, report: AdaptersReport) -> None:
        self._is_awaited = False
        entries = {entry.order: entry for entry in self._entries}
        for state in report.states:
            if state.order in self._loads:
                self._loaded(state)
            elif state.order in entries:
                self._restored(entries[state.order], state)

    def _loaded(self, state: AdapterState) -> None:
        if not state.key and state.error is None:
            return
        message = self._loads.pop(state.order)
        self._is_news = True
        if state.error is not None:
            log.warning("adapter %s was not loaded: %s", message.name, state.error)
            self._answer(message, 400, state.error)
            return
        before = self._served(message.name)
        if before is not None:
            before.is_served = False
        self._entries.append(
            _Entry(message.name, message.path, state.key, True, state.order, state.num_bytes, True)
        )
        self._changed()
        self._answer(message, 200, f"Success: LoRA adapter '{message.name}' added successfully.")

    def _restored(self, entry: _Entry, state: AdapterState) -> None:
        """Handles the worker's state of an adapter that the previous worker had."""
        if state.error is None and not state.key:
            return
        if state.key == entry.key:
            entry.is_there, entry.num_bytes = True, state.num_bytes
            return
        cause = state.error or "its files have changed since it was loaded"
        log.error("adapter %s: what was loaded is lost: %s", entry.name, cause)
        self._failed.append((entry.key, f"the adapter {entry.name} could not be loaded again: {cause}"))
        if state.key and entry.is_served:  # later requests use the file's present contents
            entry.key, entry.is_there, entry.num_bytes = state.key, True, state.num_bytes
        else:
            self._entries.remove(entry)
        self._changed()

    def worker_lost(self, cause: str) -> None:
        """Fails the adapters that were being loaded when the worker died: one of them may have killed it."""
        for message in self._loads.values():
            self._answer(message, 503, f"the engine was lost while it loaded the adapter: {cause}")
        self._loads.clear()
        self._is_awaited = False

    def worker_found(self, ready: WorkerReady) -> None:
        for entry in self._entries:
            entry.is_there = entry.key in ready.adapters.values()
        self._is_news = True

    # ---------------------------------------------------------------- for the caller

    @property
    def is_restoring(self) -> bool:
        """True while the worker lacks an adapter that its rows may need; no plan may be sent."""
        return not all(entry.is_there for entry in self._entries)

    @property
    def is_waiting(self) -> bool:
        """True while the worker is reading an adapter."""
        return bool(self._loads) or self.is_restoring

    @property
    def is_busy(self) -> bool:
        """True if the caller must call `due` every LOOK_S."""
        return self._file is not None and (
            self.is_waiting or not all(entry.is_served for entry in self._entries)
        )

    def has(self, key: str) -> bool:
        return any(entry.key == key for entry in self._entries)

    def name_of(self, key: str) -> str:
        return next((entry.name for entry in self._entries if entry.key == key), key)

    @property
    def served(self) -> list[ServedAdapter]:
        return [
            ServedAdapter(entry.name, entry.path, entry.key, entry.num_bytes)
            for entry in self._entries
            if entry.is_served
        ]

    def take_messages(self) -> list[AdaptersServed | AdapterAnswer]:
        out, self._out = self._out, []
        return out

    def take_failed(self) -> list[tuple[str, str]]:
        """Returns (key, cause) of each adapter that the worker could not load although open requests may use it."""
        failed, self._failed = self._failed, []
        return failed

    def _served(self, name: str) -> _Entry | None:
        return next((entry for entry in self._entries if entry.is_served and entry.name == name), None)

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders

    def _changed(self) -> None:
        self._is_news = True
        self._save()
        self._out.append(AdaptersServed(self.served))

    def _save(self) -> None:
        """Writes the file, before any process learns of the change."""
        if self._file is None:
            return
        saved = [SavedAdapter(entry.name, entry.path, entry.key, entry.is_served) for entry in self._entries]
        beside = self._file.with_suffix(f".{os.getpid()}")
        beside.write_bytes(msgspec.json.encode(saved))
        beside.replace(self._file)


def _read(file: Path | None) -> list[SavedAdapter] | None:
    if file is None:
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[SavedAdapter])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.error("the adapters that were loaded before are lost: %s: %s", file, error)
        return None
