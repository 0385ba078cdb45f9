"""The interface between the runner (`worker/runner.py`) and a device: forward pass, logits, sampling and counters."""

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
    """Counts how often each expert of each layer is used, and says where it is, summed over all devices."""

    tokens: npt.NDArray[np.int64]  # [layers, experts]: tokens routed to each expert since start-up
    on_gpu: npt.NDArray[np.uint8]  # [layers, experts]: 1 for an expert in GPU memory
    cache: ExpertCacheCounts | None = None  # since start-up; None: there is no expert cache


class SampledAtOnce(NamedTuple):
    """Tokens int32 [rows], one for each row of a step with drafts, sampled as if all drafts before it were accepted,
    with their logprobs. Tokens after a rejected draft are invalid."""

    tokens: Int32s
    logprobs: list[TokenLogprob | None]
    # note(slots, number of valid tokens of each) records the outputs; all slots differ
    note: Callable[[Int32s, Int32s], None]


class Engine(Protocol):
    """Owns the model, its KV cache and the sampler's state. Single-threaded. Calls in a step, in order: `begin`,
    `copy_states`, `bind` for new requests, `fork`, `forward`, `score`, then `logits`, `sample` and `sampled` for
    each group of sampled rows, with `mark_end` before the last group is read, and `finish`. If the engine
    `runs_ahead`, the next step's `forward` (without `begin`) may come between `mark_end` and `sampled`, provided
    that it needs no other calls first and that this step samples one group; `Sequences.expect` marks the tokens that
    it awaits."""

    @property
    def logit_rows(self) -> int:
        """Largest number of rows for one call of `logits` or `score`."""
        ...

    @property
    def description(self) -> str:
        """Description of the device for the log and `/health`."""
        ...

    @property
    def kernels_compiled(self) -> int:
        """Number of launches so far that were delayed: GPU kernels that were compiled, or loaded from the compiler's
        cache, and steps launched kernel by kernel because their CUDA graph was not captured yet."""
        ...

    def warm_on(self, *, is_idle: bool) -> bool:
        """Between two steps: does a piece of the postponed warm-up if one is due. is_idle: no work is waiting.
        Returns False when nothing is left."""
        ...

    def begin(self) -> None:
        """Marks the start of a step while none is in progress."""
        ...

    def settle_states(self) -> None:
        """Launches what is still to change the recurrent states that the steps so far leave. Before states are read or
        overwritten by others than `copy_states` and `forward`."""
        ...

    def copy_states(self, pairs: Int32s) -> None:
        """Copies recurrent states, before anything else of a step, for each (source, target) pair in order; source
        -1 zeroes the target. pairs: int32 [n, 2], slots."""
        ...

    def bind(self, seq: NewSeq, tokens: Int32s) -> None:
        """Assigns a request to its slot. tokens: all known tokens, prompt first."""
        ...

    def fork(self, targets: Int32s, sources: Int32s, end: int) -> None:
        """Copies rows of the device's KV slot table: the row of request slot sources[i] to that of targets[i], for
        positions 0 .. end - 1. targets, sources: int32 [n]; no target is a source. The host's tables (`Sequences`) are
        updated already. Called after `bind`."""
        ...

    def forward(
        self, layout: StepLayout, sequences: Sequences, *, has_new: bool, observer: LayerObserver | None
    ) -> None:
        """Computes, or launches, all layers for the step's rows. has_new: the step has new requests, whose rows may
        read the KV of other rows of the step."""
        ...

    def score(self, span: PromptSpan) -> list[TokenLogprob]:
        """Returns the logprobs of these prompt tokens, from the step's rows."""
        ...

    def logits(self, layout: StepLayout, first: int) -> Tensor:
        """Returns float32 [m, vocab], the logits of the sampled rows from `first` on, at most `logit_rows`; valid
        until the next call."""
        ...

    def sample(self, slots: Int32s, masks: TokenMasks | None) -> None:
        """Chooses, or launches the choice of, a token for each row of the last `logits`. slots: the rows' request
        slots."""
        ...

    def sampled(self) -> tuple[Int32s, list[TokenLogprob | None]]:
        """Waits for the last `sample`. Returns tokens and logprobs. A negative token means that the request cannot
        continue."""
        ...

    def mark_end(self) -> None:
        """Marks that all of the step has been launched."""
        ...

    @property
    def is_computed(self) -> bool:
        """Returns whether the step last marked has been computed. Only if the engine `runs_ahead`."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """True if a step may be launched before the host has read the tokens of the previous one."""
        ...

    def launches_at_once(self, counts: Sequence[int], drafts: Sequence[int]) -> bool:
        """Returns whether launching a step takes the host much less time than the step takes the device. counts:
        tokens per sequence, sequences with one token first; none is new. drafts: how many of each one's tokens
        may be drafts."""
        ...

    def finish(self) -> float:
        """Waits for the step last marked. Raises if the device failed. Returns its milliseconds by the device's
        clock, from `begin` or, if launched ahead, from the end of the previous step; 0: no such clock."""
        ...

    @property
    def layers_ms(self) -> float:
        """Returns the milliseconds that the last finished step's layers took, if it had drafts: by the device's clock,
        from their beginning, and by the host's for layers that it computes first; invalid without such a clock."""
        ...

    def forget(self, layout: StepLayout) -> None:
        """Undoes the engine's first step: no KV, slots or counts of its rows remain."""
        ...

    def expert_counts(self) -> ExpertCounts:
        """Returns the experts' use. Between two steps."""
        ...

    def take_expert_cache_counts(self) -> ExpertCacheCounts | None:
        """Returns the expert cache's counts since the last call; None without an expert cache."""
        ...

    @property
    def waits_for_logits(self) -> bool:
        """True if `logits` returns when the logits are computed; False if it only launches the computation."""
        ...

    @property
    def counts_every_step(self) -> bool:
        """True if `weight_bytes_since` is correct over any number of steps; False: over one step only."""
        ...

    def weight_counters(self) -> object:
        """Returns the counters' state for `weight_bytes_since`."""
        ...

    def weight_bytes_since(self, counters: object) -> int:
        """Returns the bytes of weights read from the slowest memory that holds weights, since `weight_counters`
        returned `counters`. Each distinct expert counts once per step."""
        ...

    def read_weights(self) -> tuple[float, int]:
        """Reads the experts in that memory once. Returns the seconds taken and the bytes read."""
        ...
