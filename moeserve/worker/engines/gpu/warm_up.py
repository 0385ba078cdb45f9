"""What a GPU engine does before its first step, so that no step waits: its kernels compiled, or loaded from Triton's
cache on disk, and its steps recorded. Where answers wait for it, in pieces between the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from moeserve.kernels.launch import compile_ahead, first_launches
from moeserve.models.loading.progress import COMPILING, RECORDING, OnProgress
from moeserve.worker.engines.gpu.expert_exchange import ExpertCache
from moeserve.worker.engines.gpu.steps.graph_steps import RecordedSteps
from moeserve.worker.engines.gpu.steps.micro_batches import MicroBatches

# Steps from one piece to the next: a piece takes as long as some steps. None waits for its turn where nothing is to be
# computed, or where a step has asked for it.
STEPS_PER_PIECE: Final = 8
_NOTHING: Final = object()


class WarmUp:
    """Of one engine. Before its first step there is one call: `compile` and then `record`, or `put_off`."""

    def __init__(
        self,
        recorded: RecordedSteps,
        launch_every_kind: Callable[[Sequence[int]], None],
        sizes: Sequence[int],
        max_num_seqs: int,
        micro_batches: MicroBatches | None,
        expert_cache: ExpertCache | None,
    ) -> None:
        """launch_every_kind: launches all that steps of these sizes can. sizes: all."""
        self._recorded = recorded
        self._launch_every_kind = launch_every_kind
        self._sizes = sizes
        self._max_num_seqs = max_num_seqs
        self._micro_batches = micro_batches
        self._expert_cache = expert_cache
        self._pieces: Iterator[None] = iter(())
        self._steps = 0

    def compile(self, on_progress: OnProgress) -> None:
        """Compiles every kernel that a step can launch, on all cores at once. What was compiled on this machine before
        comes from Triton's cache on disk. Nothing runs."""
        with compile_ahead(partial(on_progress, COMPILING)):
            self._launch_every_kind(self._sizes)
            if self._expert_cache is not None:
                self._expert_cache.compile()

    def record(self, on_progress: OnProgress = lambda stage, done, total: None) -> None:
        """Records steps. Again, it records them anew."""
        self._recorded.record(self._max_num_seqs, partial(on_progress, RECORDING))
        self._record_others()

    def _record_others(self) -> None:
        if self._micro_batches is not None:
            sizes = self._recorded.decode_sizes(self._max_num_seqs)
            self._micro_batches.record(sizes, self._recorded.logits)
        if self._expert_cache is not None:
            self._expert_cache.record()

    def put_off(self) -> None:
        """Has `go_on` do it, but for what the first step needs."""
        if self._expert_cache is not None:
            with compile_ahead():
                self._expert_cache.compile()
        self._recorded.plan(self._max_num_seqs)
        self._record_others()
        self._pieces = self._in_pieces()

    def go_on(self, *, is_idle: bool) -> bool:
        """Does a piece, if it is time for one. False when nothing is left."""
        self._steps += 1
        if is_idle or self._recorded.is_wanted or self._steps % STEPS_PER_PIECE == 0:
            return next(self._pieces, _NOTHING) is not _NOTHING
        return True

    def _in_pieces(self) -> Iterator[None]:
        while self._recorded.record_next():
            yield
        for size in self._sizes:
            with compile_ahead():
                self._launch_every_kind([size])
            yield

    @property
    def missed(self) -> int:
        """Launches that had to compile their kernel, or load it from disk, and steps that were not recorded yet."""
        return first_launches() + self._recorded.late
