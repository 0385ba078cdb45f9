"""ExpertHandoff: a layer's experts on the CPU as three calls in a GPU stream.

    handoff.begin()                                     once a step, eager or replayed: the pool stands by
    for each layer:
        handoff.publish(layer, y, ids, weights)         queued on the current stream; the pool starts when it has run
        ... the GPU's own experts, meanwhile ...
        handoff.collect(layer, out)                     the stream waits for the pool; out = what the CPU's experts add
    torch.cuda.synchronize(); handoff.check()

`publish` and `collect` hold constants only, so a CUDA graph that captured them replays for ever. `begin` is a call from
Python and no part of the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels import _C
from moeserve.kernels.cpu_stream import Activations, CpuStream, Matrix, RoutingRoom
from moeserve.kernels.handoff.region import Region
from moeserve.kernels.handoff.wait import PollingWait, Wait, choose_wait

log = logging.getLogger(__name__)


class HandoffError(RuntimeError):
    """A step's hand-off failed: a hang that the watchdog ended, or a request that makes no sense. The results of the
    steps under way are worthless, and the hand-off is of no more use."""


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """The experts of one layer that are on the CPU, a subset of the layer's."""

    gate: Matrix  # [E, ff, hidden], only the E experts that are here
    up: Matrix  # [E, ff, hidden]
    down: Matrix  # [E, hidden, ff]
    local_ids: Tensor  # int32 [the layer's experts], on the GPU: an expert's place in the matrices, -1: not here

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        return self.gate, self.up, self.down


class ExpertHandoff:
    """The hand-off of all layers of one model. Owns the shared memory and the watchdog; uses the stream's pool.

    Between `begin` and the last layer's answer the pool belongs to the step: other operations queued on its stream run
    after it. Its threads spin while they wait for the next layer (for a millisecond, then they doze); between steps
    they sleep.
    """

    def __init__(
        self,
        stream: CpuStream,
        layers: Sequence[CpuExperts | None],
        max_tokens: int,
        hidden: int,
        top_k: int,
        device: torch.device | str = "cuda",
        *,
        timeout_s: float = 60.0,
        polling: bool = False,
    ) -> None:
        """layers: each layer's CPU experts, None where there are none. max_tokens: rows of the largest step.

        device: whose tensors `publish` and `collect` take; "cpu" (with Triton's interpreter) is for tests. timeout_s:
        how long a step may stand still, on either side, before it counts as hung; it must cover what compiles between
        `begin` and the last layer. polling: wait with a kernel that polls, whether or not the driver could wait itself.

        Raises ValueError for shapes that do not fit one another and MemoryError without room for the pinned memory.
        """

    def begin(self) -> None:
        """The pool stands by for one step: every layer that has CPU experts, in order, published once each.

        Call it before or right after launching the step, once for each execution (not while capturing). Returns at once;
        several steps may be under way.
        """

    def publish(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Queues: rows to the CPU, where its experts start on them at once.

        x: float32, bfloat16 or float16 [n, hidden]; ids: int32 [n, top_k], the layer's expert ids, below 0: none (a
        padding row has nothing else); weights: float32 [n, top_k]. Contiguous, on the device, n <= max_tokens. What
        is not on the CPU is left out; when that is everything, the stream will not wait.
        """

    def collect(self, layer: int, out: Tensor) -> None:
        """Queues: waits for the CPU, then out[i] = sum of weights[i, j] * expert(x[i]) over row i's CPU experts, zeros for
        a row without any. out: float32 [n, hidden] with the n of `publish`."""

    def check(self) -> None:
        """Raises HandoffError for what the pool or the watchdog found. Call when the device has finished a step: after
        an error the stream goes on with worthless results."""

    def heat(self, layer: int) -> Tensor:
        """int64 [2, E]: tokens that went to each CPU expert, and steps that read its weights, since the start."""

    def close(self) -> None:
        """Ends the watchdog and frees the shared memory; a step still under way is abandoned. May be called twice."""
