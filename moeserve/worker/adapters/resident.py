"""The adapters that the engine holds, and loading further ones while it computes.

A helper thread reads and checks an adapter's files and converts them to the kernels' layout. The computing thread
then installs the adapter between two steps, which takes milliseconds. A bad file fails only the order that named it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from moeserve.config.units import MIB
from moeserve.errors import UserError
from moeserve.messages.adapters import AdapterSource, AdaptersReport, AdapterState, AdaptersWanted
from moeserve.models.adapters.adapter import Adapter
from moeserve.models.adapters.open import open_adapter
from moeserve.models.adapters.read_gguf import GgufAdapter
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.interface import ModelShape
from moeserve.processes.free_memory import available_bytes

log = logging.getLogger(__name__)


Matrices = TypeVar("Matrices")


class AdapterSlots(Protocol[Matrices]):
    """An engine's adapters by number. Matrices: an adapter in the kernels' layout."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def capacity(self) -> int:
        """Number of adapters that fit."""
        ...

    def check(self, checked: PeftAdapter | GgufAdapter) -> None:
        """Raises AdapterError if the engine cannot use the adapter."""
        ...

    def needed_bytes(self, checked: PeftAdapter | GgufAdapter) -> int:
        """Bytes of adapter memory needed while the adapter is read."""
        ...

    def prepare(self, adapter: Adapter) -> Matrices:
        """Returns an adapter's matrices in the kernels' layout. Runs in another thread, beside the steps. Raises
        MemoryError if they do not fit into memory."""
        ...

    def held_bytes(self, matrices: Matrices) -> int:
        """Bytes of adapter memory that a loaded adapter takes."""
        ...

    def put(self, number: int, matrices: Matrices) -> None:
        """Installs an adapter. May be called only between two steps. Raises MemoryError."""
        ...

    def remove(self, number: int) -> None:
        """Removes an adapter. May be called only between two steps, when no row uses the adapter any more."""
        ...


class AdapterAtStart(NamedTuple):
    """An adapter of --lora-modules."""

    name: str
    key: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _ReadAdapter(Generic[Matrices]):
    key: str
    matrices: Matrices
    num_bytes: int


class ResidentAdapters(Generic[Matrices]):
    """Owns the engine's adapters; only the thread that executes plans may use it. `numbers` maps keys to adapter
    numbers, with -1 for the model without an adapter."""

    def __init__(
        self,
        engine: AdapterSlots[Matrices],
        at_start: Sequence[AdapterAtStart],
        budget: int,
        folder: str | None = None,
    ) -> None:
        """at_start: adapters already in `engine`, in order. budget: bytes for adapters loaded later. folder: the folder
        of --lora-dir; links in it must not lead outside, and error messages do not contain its path."""
        self._engine = engine
        self._folder = None if folder is None else Path(folder)
        self._sizes = {adapter.key: adapter.num_bytes for adapter in at_start}
        self._budget = budget + sum(self._sizes.values())
        self._numbers = {"": -1} | {adapter.key: number for number, adapter in enumerate(at_start)}
        self._free = [number for number in range(engine.capacity) if number >= len(at_start)]
        self._outcomes: dict[int, AdapterState] = {}  # order → outcome of an adapter that was read
        self._reader = ThreadPoolExecutor(1, "adapters")  # starts its thread with the first order
        self._reading: tuple[AdapterSource, Future[_ReadAdapter[Matrices]]] | None = None

    @property
    def numbers(self) -> Mapping[str, int]:
        return self._numbers

    def forget_orders(self) -> None:
        """Forgets all orders, because the next router starts its own numbering."""
        self._outcomes.clear()
        self._reading = None

    def want(self, wanted: AdaptersWanted) -> AdaptersReport:
        """Makes progress between two steps: removes unwanted adapters, installs adapters that have been read, and
        starts to read the next. Returns the state of each wanted adapter."""
        sources = wanted.sources
        orders = {source.order for source in sources}
        self._outcomes = {order: state for order, state in self._outcomes.items() if order in orders}
        self._give_up(sources)
        self._collect(orders)
        states = [self._state(source) for source in sources]
        self._read_next(
            source for source, state in zip(sources, states, strict=True) if not (state.key or state.error)
        )
        return AdaptersReport(states)

    def _give_up(self, sources: Sequence[AdapterSource]) -> None:
        kept = {source.key for source in sources} | {state.key for state in self._outcomes.values()}
        for key in [key for key in self._numbers if key and key not in kept]:
            number = self._numbers.pop(key)
            self._engine.remove(number)
            self._free.append(number)
            del self._sizes[key]

    def _collect(self, orders: set[int]) -> None:
        """Installs the adapters that the helper thread has read."""
        if self._reading is None or not self._reading[1].done():
            return
        (source, future), self._reading = self._reading, None
        if source.order not in orders:
            return
        try:
            state = self._install(source, future.result())
        except (UserError, OSError, MemoryError) as error:
            state = self._failed(source, str(error) or "there is too little memory for it")
        except Exception as error:  # a bug of a reader on an untrusted file must not end running answers
            log.exception("adapter %s", source.name)
            state = self._failed(source, f"{source.path}: {type(error).__name__}: {error}")
        self._outcomes[source.order] = state

    def _failed(self, source: AdapterSource, error: str) -> AdapterState:
        """Returns the state of a failed order; clients see the text."""
        if self._folder is not None:
            error = error.replace(f"{self._folder}{os.sep}", "")
        return AdapterState(source.order, error=error)

    def _install(self, source: AdapterSource, adapter: _ReadAdapter[Matrices]) -> AdapterState:
        if adapter.key not in self._numbers:
            if not self._free:
                return AdapterState(source.order, error="there are as many adapters as --max-loras allows")
            self._engine.put(self._free[-1], adapter.matrices)
            self._numbers[adapter.key] = self._free.pop()
            self._sizes[adapter.key] = adapter.num_bytes
        return AdapterState(source.order, adapter.key, self._sizes[adapter.key])

    def _state(self, source: AdapterSource) -> AdapterState:
        if source.key in self._numbers and source.key:
            return AdapterState(source.order, source.key, self._sizes[source.key])
        return self._outcomes.get(source.order, AdapterState(source.order))

    def _read_next(self, sources: Iterable[AdapterSource]) -> None:
        if self._reading is None and (source := next(iter(sources), None)) is not None:
            room = self._budget - sum(self._sizes.values())
            self._reading = source, self._reader.submit(self._read, source, room)

    def _read(self, source: AdapterSource, room: int) -> _ReadAdapter[Matrices]:
        """Reads an adapter, in the helper thread. Raises UserError, OSError, MemoryError."""
        path, folder = Path(source.path), self._folder
        is_within = folder is not None and path.is_relative_to(folder)  # otherwise from --lora-modules
        checked = open_adapter(source.name, path, self._engine.shape, folder if is_within else None)
        self._engine.check(checked)
        # one copy as read, one in the kernels' layout
        self._check_size(source, 2 * checked.nbytes, available_bytes())
        self._check_size(source, self._engine.needed_bytes(checked), room)
        adapter = checked.read()
        matrices = self._engine.prepare(adapter)
        size = self._engine.held_bytes(matrices)
        self._check_size(source, size, room)
        log.info(
            "adapter %s: %d products, rank up to %d, %.1f MiB",
            *(source.name, len(adapter.products), adapter.rank, size / MIB),
        )
        return _ReadAdapter(adapter.key, matrices, size)

    def _check_size(self, source: AdapterSource, size: int, left: int) -> None:
        if size > left:
            raise UserError(
                f"{source.path}: needs {size / MIB:.1f} MiB of memory, and {max(left, 0) / MIB:.1f} MiB are left for "
                "adapters: unload others, or start the server with more of --lora-memory"
            )
