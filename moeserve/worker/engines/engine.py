"""The interface of a device to the one runner (`worker/runner.py`): forward, logits, sampling and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import NewSeq
from moeserve.models.observer import LayerObserver
from moeserve.worker.sequences import Int32s, PromptSpan, Sequences, StepLayout

# Bit masks of allowed tokens (int32 [any, words]), and each row's index into them (int32 [rows], -1: any token).
TokenMasks = tuple[Int32s, Int32s]


class ExpertCounts(NamedTuple):
    """Expert counts of all layers, those of every device together."""

    tokens: npt.NDArray[np.int64]  # [layers, experts]: routed to each expert since the start
    on_gpu: npt.NDArray[np.uint8]  # [layers, experts]: 1 for an expert in GPU memory
    cache: ExpertCacheCounts | None = None  # since the start; None: experts stay where they are


class SampledAtOnce(NamedTuple):
    """A token for each drafted position, as if the drafts before it were right. Behind a wrong one it means nothing."""

    tokens: Int32s
    logprobs: list[TokenLogprob | None]
    note: Callable[[Int32s, Int32s], None]  # slots, none twice, and how many of their tokens count


class Engine(Protocol):
    """Owns the model, its KV cache and the sampler's state. Calls come from one thread, a step's in this order:
    `begin`, `copy_states`, `bind` of its new requests, `fork`, `forward`, `score`, then `logits`, `sample` and
    `sampled` for each group of sampled rows, `mark_end` before the last group is read, `finish`. Where it `runs_ahead`,
    the next step's `forward`, without `begin`, may come between `mark_end` and `sampled`, if it needs no calls before
    it and this step samples one group; `Sequences.expect` has what it awaits."""

    @property
    def logit_rows(self) -> int:
        """The most rows that one call of `logits` or `score` takes."""
        ...

    @property
    def description(self) -> str:
        """The device in words, for the log and `/health`."""
        ...

    @property
    def kernels_compiled(self) -> int:
        """Kernels of a GPU that a launch so far had to wait for: compiled, or loaded from the compiler's cache; and
        steps that were launched kernel by kernel, because their CUDA graph was still to be captured."""
        ...

    def warm_on(self, *, is_idle: bool) -> bool:
        """Between two steps: does a piece of what the start has put off, if it is time for one. is_idle: nothing waits
        to be computed. False when nothing is left."""
        ...

    def begin(self) -> None:
        """A step begins, and none is under way."""
        ...

    def copy_states(self, pairs: Int32s) -> None:
        """Before anything else of a step: of recurrent states, for each pair (source, target) in order, slot target
        becomes slot source, or zeros where source is -1. pairs: [n, 2]."""
        ...

    def bind(self, seq: NewSeq, tokens: Int32s) -> None:
        """A request takes its slot, whatever the slot held. tokens: all known ones, prompt first."""
        ...

    def fork(self, targets: Int32s, sources: Int32s, end: int) -> None:
        """Request slots take over the KV slots of others at positions 0 .. end-1; no target is a source. The host's
        tables (`Sequences`) have them already. After `bind`."""
        ...

    def forward(
        self, layout: StepLayout, sequences: Sequences, *, has_new: bool, observer: LayerObserver | None
    ) -> None:
        """Computes, or launches, all layers for the step's rows. has_new: requests were bound for this step, whose rows
        may read the KV of others of the step."""
        ...

    def score(self, span: PromptSpan) -> list[TokenLogprob]:
        """How likely the step's rows found these prompt tokens."""
        ...

    def logits(self, layout: StepLayout, first: int) -> Tensor:
        """float32 [m, vocab] of the sampled rows from `first` on, at most `logit_rows`; valid until the next call."""
        ...

    def sample(self, slots: Int32s, masks: TokenMasks | None) -> None:
        """Chooses, or launches the choice of, a token for each row of the last `logits`, whose requests are these."""
        ...

    def sampled(self) -> tuple[Int32s, list[TokenLogprob | None]]:
        """Waits for what was last to be sampled. A token below 0 says that the row has none: its request cannot go
        on."""
        ...

    def mark_end(self) -> None:
        """All of the step has been launched."""
        ...

    @property
    def is_computed(self) -> bool:
        """Whether all of the step that was last marked is. Of an engine that `runs_ahead`."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched before the host has the tokens of the one before."""
        ...

    def launches_at_once(self, counts: Sequence[int]) -> bool:
        """Whether launching a step takes the host much less time than the step takes the device. counts: the tokens of
        each sequence, those of one token first; none of them is new."""
        ...

    def finish(self) -> float:
        """Waits for all of the step that was last marked. Raises where the device failed. Returns its milliseconds by
        the device's clock, from `begin` on or, launched ahead, from the end of the step before; 0: it has none."""
        ...

    def forget(self, layout: StepLayout) -> None:
        """Undoes the step of these rows, which is the engine's first: no KV, slots or counts of it remain."""
        ...

    def expert_counts(self) -> ExpertCounts:
        """Between two steps."""
        ...

    def take_expert_cache_counts(self) -> ExpertCacheCounts | None:
        """Since the last call; None: there is no expert cache."""
        ...

    @property
    def waits_for_logits(self) -> bool:
        """Whether `logits` returns when they are computed, and not when that is launched."""
        ...

    @property
    def counts_every_step(self) -> bool:
        """`weight_bytes_since` is right for any number of steps; else for one."""
        ...

    def weight_counters(self) -> object:
        """The state of the counters, for `weight_bytes_since`."""
        ...

    def weight_bytes_since(self, counters: object) -> int:
        """Bytes of weights that had to be read since then, from the slower memory in use: each distinct expert once a
        step."""
        ...

    def read_weights(self) -> tuple[float, int]:
        """Reads the experts in that memory once. Returns the seconds taken and the bytes read."""
        ...
