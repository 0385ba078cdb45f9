"""The queue of the pool's operations: owns the threads, and keeps operands alive until they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch

from moeserve.kernels import _C
from moeserve.kernels.codebooks import bring_codebook
from moeserve.kernels.stream_operands import ThreadPlacement

LEAST_GAIN: Final = 1.03  # least speed-up of a product that is not measurement noise


class Recorded:
    """Operations that were launched, and their operands: to be launched again, on the operands' new contents."""

    def __init__(self, native: _C.RecordedOperations, held: list[object]) -> None:
        self.native = native
        self.held = held


class OperationQueue:
    """Starts the threads. `CpuStream` adds the operations."""

    def __init__(self, threads: int | Sequence[ThreadPlacement], isa: str = "") -> None:
        """threads: a number (unbound, on one NUMA node), or the placement of each. isa: "plain", "avx2",
        "avx_vnni", "avx512_vnni", "avx512_vbmi", "neon_dotprod" or "neon_i8mm"; "": the best that this CPU supports.

        Raises ValueError for an ISA that this CPU or build lacks.
        """
        placements = [ThreadPlacement()] * threads if isinstance(threads, int) else threads
        self.nodes = 1 + max(p.node for p in placements)
        self._native = _C.Stream([(p.node, list(p.cpus)) for p in placements], isa)
        # Operands of the launched operations; without this, temporaries (a batch's ids, a norm's weight) would be freed
        # while the pool reads them.
        self._held: list[object] = []
        # Operands of operations that `wait` has waited for; freed later, while the pool computes and no call waits.
        self._released: list[object] = []

    @property
    def isa(self) -> str:
        return self._native.isa

    @property
    def native(self) -> _C.Stream:
        return self._native

    def choose_products(
        self,
        types: Iterable[int],
        weight_bytes: int,
        least_gain: float = LEAST_GAIN,
        known: Mapping[int, Sequence[Sequence[float]]] | None = None,
    ) -> list[_C.ProductSpeed]:
        """Measures which form of the product is the fastest at multiplying packed weights of `types` (ggml's numbers)
        by one to sixteen tokens, from memory and with all threads: another of this CPU's instruction sets, reading in
        order (csrc/arch/in_order.h), or prefetching into the second-level cache. From then on products use it if it is
        at least `least_gain` times as fast as `self.isa`. The results' bits do not depend on it. Takes some 0.1 s per
        type, at most about a second of each thread's CPU time and 5 s by the clock; does nothing if there is no choice,
        or if caches hold all `weight_bytes`. May be called only while no operation is queued.

        known: speeds by type, for 1, 2, 3, 4 and 8 tokens, as an earlier call returned them; they are not measured
        again.

        Returns what decided: `type`, `tokens` (8: five to sixteen), `form` (the chosen one: `self.isa` or another
        name), `speeds` (of the other forms, relative to `self.isa`) and `is_known`. Types with codebooks end with the
        first number of tokens with which no other form is `least_gain` times as fast.
        """
        numbers = list(types)
        for number in numbers:
            bring_codebook(number)
        known_speeds = {
            number: [list(of_forms) for of_forms in speeds] for number, speeds in (known or {}).items()
        }
        return self._native.choose_products(numbers, weight_bytes, least_gain, known_speeds)

    @property
    def threads(self) -> int:
        return self._native.threads

    @property
    def recomputed(self) -> int:
        """Number of work units since start-up that another thread computed again because the thread that had begun
        them made no progress: how often threads lost their cores."""
        return self._native.recomputed

    @property
    def fetched_ahead(self) -> int:
        """Number of times that a thread, while it waited within an operation, prefetched weights of a later operation
        into its cache."""
        return self._native.fetched_ahead

    @property
    def pool(self) -> _C.Pool:
        return self._native.pool

    def wait(self) -> None:
        if not self._held:  # nothing was launched since; operands are freed later, while the pool computes
            self._native.wait()
            return
        self._released.clear()
        self._native.wait()
        self._held, self._released = self._released, self._held

    @property
    def is_idle(self) -> bool:
        """True if nothing was launched since the last `wait`."""
        return not self._held

    def record(self, launch: Callable[[], None]) -> Recorded:
        """Calls `launch`, and returns the operations that it launched. To `repeat` them takes a hundredth of the time
        of the calls, because only addresses are copied. So each operand must be the same tensor in the same place;
        only its contents may differ. Ids among the contents are not checked again: see `put_ids`."""
        native, first = _C.RecordedOperations(), len(self._held)
        self._native.begin_record(native)
        try:
            launch()
        finally:
            self._native.end_record(native)
        return Recorded(native, self._held[first:])

    def repeat(self, recorded: Recorded) -> bool:
        """Launches recorded operations again. Returns False, and launches nothing, if they must be recorded anew:
        a buffer of the stream's own has grown since."""
        if not self._native.repeat(recorded.native):
            return False
        self._held.append(recorded)
        return True

    @staticmethod
    def put_ids(what: str, source: torch.Tensor, target: torch.Tensor, count: int) -> None:
        """Copies source, int32 [n], to the start of target, int32, which recorded operations read. what: the ids' name,
        for the error. Raises IndexError for an id that is not in [0, count), and then copies nothing."""
        _C.copy_ids(what, source, target, count)
