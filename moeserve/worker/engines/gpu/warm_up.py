"""Warm-up of a GPU engine: before the first step, compiles its kernels (or loads them from Triton's disk cache) and
captures its CUDA graphs, so that no step waits for it. If answers are waiting, this is done in pieces between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from moeserve.kernels.launch import compile_ahead, first_launches
from moeserve.models.loading.progress import CAPTURING, COMPILING, OnProgress
from moeserve.worker.engines.gpu.expert_exchange import ExpertCache
from moeserve.worker.engines.gpu.next_token_chain import NextTokenChain
from moeserve.worker.engines.gpu.steps.block_steps import BlockSteps
from moeserve.worker.engines.gpu.steps.graph_steps import GraphSteps
from moeserve.worker.engines.gpu.steps.micro_batches import MicroBatches
from moeserve.worker.engines.gpu.steps.step_path import StepFacts, decode_sizes_in_parts

# Steps between two pieces, as a piece takes as long as several steps. Ignored while idle, or if a step needs the piece.
STEPS_PER_PIECE: Final = 8
_NOTHING: Final = object()


class WarmUp:
    """The warm-up of one engine. Before the first step call `compile` and `capture`, or `put_off`."""

    def __init__(
        self,
        graphs: GraphSteps,
        launch_all_kernels: Callable[[Sequence[int]], None],
        facts: StepFacts,
        micro_batches: MicroBatches | None,
        expert_cache: ExpertCache | None,
        drafting: Sequence[BlockSteps | NextTokenChain] = (),
    ) -> None:
        """launch_all_kernels: launches all kernels that steps of these sizes can need. drafting: the parts of the block
        that drafts; none without one."""
        self._graphs = graphs
        self._launch_all_kernels = launch_all_kernels
        self._facts = facts
        self._micro_batches = micro_batches
        self._expert_cache = expert_cache
        self._drafting = drafting
        self._pieces: Iterator[None] = iter(())
        self._steps = 0
        self._small: WarmUp | None = None  # that of the small model that drafts

    def go_on_with(self, small: WarmUp) -> None:
        """Lets `go_on` do what the small model that drafts has put off, after this engine's own pieces; graphs that a
        draft has asked for come before those for which no step has asked."""
        self._small = small

    def compile(self, on_progress: OnProgress) -> None:
        """Compiles every kernel that a step can launch, on all cores. Kernels compiled earlier on this machine come
        from Triton's disk cache. Executes nothing."""
        with compile_ahead(partial(on_progress, COMPILING)):
            self._launch_all_kernels(self._facts.sizes)
            if self._expert_cache is not None:
                self._expert_cache.compile()
            for part in self._drafting:
                part.compile()

    def capture(self, on_progress: OnProgress = lambda stage, done, total: None) -> None:
        """Captures the CUDA graphs; a second call captures them anew."""
        self._graphs.capture_all(partial(on_progress, CAPTURING))
        self._capture_others()
        for part in self._drafting:
            for _ in part.capture_each():
                pass

    def _capture_others(self) -> None:
        if self._micro_batches is not None:
            self._micro_batches.capture(decode_sizes_in_parts(self._facts), self._graphs.logits)
        if self._expert_cache is not None:
            self._expert_cache.capture()

    def put_off(self) -> None:
        """Postpones the warm-up to calls of `go_on`, except the parts that the first step needs."""
        if self._expert_cache is not None:
            with compile_ahead():
                self._expert_cache.compile()
        for part in self._drafting:
            with compile_ahead():
                part.compile()
        self._graphs.plan()
        self._capture_others()
        self._pieces = self._in_pieces()

    def go_on(self, *, is_idle: bool) -> bool:
        """Does one piece of the postponed warm-up if it is due. Returns False when nothing is left."""
        self._steps += 1
        small = self._small
        if small is not None and small._graphs.is_wanted and not self._graphs.is_wanted:
            return small.go_on(is_idle=is_idle)
        if is_idle or self._graphs.is_wanted or self._steps % STEPS_PER_PIECE == 0:
            if next(self._pieces, _NOTHING) is not _NOTHING:
                return True
            return small is not None and small.go_on(is_idle=True)
        return True

    def _in_pieces(self) -> Iterator[None]:
        while self._graphs.capture_next():
            yield
        for part in self._drafting:
            yield from part.capture_each()
        for size in self._facts.sizes:
            with compile_ahead():
                self._launch_all_kernels([size])
            yield

    @property
    def missed(self) -> int:
        """Number of launches that had to compile or load their kernel, and of steps whose graph was not captured
        yet, those of a small model that drafts included."""
        return first_launches() + self._graphs.late + (0 if self._small is None else self._small._graphs.late)
