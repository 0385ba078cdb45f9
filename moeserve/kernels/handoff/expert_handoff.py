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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels import _C
from moeserve.kernels.cpu_stream import CpuStream, Matrix
from moeserve.kernels.gating import OAI_ALPHA, Activation, form_of
from moeserve.kernels.handoff.region import Region, Slot
from moeserve.kernels.handoff.triton import combine_kernel, poll_kernel, publish_kernel
from moeserve.kernels.launch import next_power_of_2, pdl, row_stride
from moeserve.kernels.stream_operands import Activations


class HandoffError(RuntimeError):
    """A step's hand-off failed: a hang that the watchdog ended, or a request that makes no sense. The results of the
    steps under way are worthless, and the hand-off is of no more use."""


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """The experts of one layer that are on the CPU, a subset of the layer's."""

    gate: Matrix  # [E, ff, hidden], only the E experts that are here
    up: Matrix  # [E, ff, hidden]
    down: Matrix  # [E, hidden, ff]
    expert_map: (
        Tensor  # int32 [the layer's experts], on the GPU: an expert's place in the matrices, -1: not here
    )
    activation: Activation = "silu"
    # float32 [E, ff], [E, ff], [E, hidden] in RAM, contiguous: added to the three products. None: nothing is.
    biases: tuple[Tensor, Tensor, Tensor] | None = None
    limit: float | None = None  # of the activation: kernels/gating.py
    alpha: float = OAI_ALPHA

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
    ) -> None:
        """layers: each layer's CPU experts, None where there are none. max_tokens: rows of the largest step.

        device: whose tensors `publish` and `collect` take; "cpu" (under Triton's interpreter) is for tests.
        timeout_s: how long a step may stand still, on either side, before it counts as hung; it must cover
        what compiles between `begin` and the last layer.

        Raises ValueError for shapes that do not fit one another, RuntimeError where the memory cannot be pinned.
        """
        _check_shapes(layers, hidden, max_tokens)
        self._stream, self._layers = stream, list(layers)
        self._hidden, self._top_k, self._max_tokens = hidden, top_k, max_tokens
        self._device = torch.device(device)
        self._size = next_power_of_2(hidden)
        some = [e for e in layers if e is not None]
        inputs = [m.integer for e in some for m in (e.gate, e.up)]
        self._region = Region(
            len(layers),
            max_tokens,
            hidden,
            top_k,
            floats=not all(inputs),
            integers=any(inputs),
            pinned=self._device.type == "cuda",
        )
        # On the device; see publish_kernel. `_present` and `_waits` have two rows: of even layers and of odd ones.
        self._steps = torch.zeros(len(layers), dtype=torch.int32, device=device)
        self._ticket = torch.zeros(1, dtype=torch.int64, device=device)
        self._present = torch.zeros(2, max_tokens, dtype=torch.int32, device=device)
        self._waits = torch.zeros(2, 4, dtype=torch.int32, device=device)
        most = max((e.gate.experts for e in some), default=0)
        self._counts = torch.zeros(len(layers), 2 * most, dtype=torch.int64)
        experts = [0 if e is None else e.gate.experts for e in layers]
        self._token_counts: list[Tensor] = [
            own[: 2 * count].view(2, count) for own, count in zip(self._counts, experts, strict=True)
        ]
        self._native: _C.Handoff | None = self._make_native(some, timeout_s)

    def begin(self) -> None:
        """The pool stands by for one step: every layer that has CPU experts, in order, published once each.

        Call it before or right after launching the step, once for each execution (not while capturing). Returns at
        once; several steps may be under way.
        """
        self._live().begin()

    def publish(
        self,
        layer: int,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        expert_map: Tensor | None = None,
        *,
        on_gpu: Tensor | None = None,
    ) -> None:
        """Queues: rows to the CPU, where its experts start on them at once.

        x: float32, bfloat16 or float16 [n, hidden]; ids: int32 [n, top_k], the layer's expert ids, below 0: none (a
        padding row has nothing else); weights: float32 [n, top_k].
        expert_map: in place of the layer's, where not all of its experts are to be computed here, -1 for the others.
        on_gpu: int32 [n, top_k], laid out as ids, where experts move while steps run: routes from 0 on are the GPU's,
        whatever the map says. The GPU's kernels decide by the same numbers, so that each route is computed once.
        On the device; x contiguous, ids and weights contiguous or columns of wider tensors; n <= max_tokens. What is
        not on the CPU is left out; when that is everything, the stream will not wait.
        """
        n = len(x)
        if self._layers[layer] is None or not 0 < n <= self._max_tokens:
            raise ValueError(f"layer {layer} cannot hand off {n} rows")
        region = self._region
        self._launch_publish(
            layer,
            x,
            ids,
            weights,
            region.slots[layer % 2],
            region.requests[layer],
            region.answers[layer],
            self._steps[layer:],
            expert_map,
            on_gpu,
        )

    def collect(self, layer: int, out: Tensor) -> None:
        """Queues: waits for the CPU, then out[i] = sum of weights[i, j] * expert(x[i]) over row i's CPU experts, zeros
        for a row without any. out: float32 [n, hidden] with the n of `publish`."""
        # A third of the time of the driver's stream memory operation.
        answer, waits = self._region.answers[layer], self._waits[layer % 2]
        poll_kernel((1,), answer, waits, pdl(), num_warps=1, launch_pdl=pdl())
        combine_kernel(
            (len(out),),
            self._region.slots[layer % 2].result,
            self._present[layer % 2],
            out,
            self._hidden,
            self._size,
            pdl(),
            num_warps=max(1, min(8, self._size // 256)),
            launch_pdl=pdl(),
        )

    def check(self) -> None:
        """Raises HandoffError for what the pool or the watchdog found. Call when the device has finished a step: after
        an error the stream goes on with worthless results."""
        self._live()

    def expert_token_counts(self, layer: int) -> Tensor:
        """int64 [2, E]: tokens that went to each CPU expert, and steps that read its weights, since the start.
        Written by the pool: read it between steps."""
        return self._token_counts[layer]

    def expert_reads(self, layers: npt.NDArray[np.bool_]) -> int:
        """Experts whose weights steps have read since the start, those of `layers` [layers] together, each once a step,
        as far as the step under way has come."""
        return self._live().expert_reads(layers)

    def close(self) -> None:
        """Ends the watchdog; a step still under way is abandoned, which lets the device finish it. May be called
        twice."""
        if self._native is None:
            return
        self._native.abandon("closed")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._native = None

    def _live(self) -> _C.Handoff:
        if self._native is None:
            raise HandoffError("closed")
        error = self._native.error()
        if error:
            raise HandoffError(error)
        return self._native

    def _launch_publish(
        self,
        layer: int,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        slot: Slot,
        request: Tensor,
        answer: Tensor,
        steps: Tensor,
        expert_map: Tensor | None = None,
        on_gpu: Tensor | None = None,
    ) -> None:
        experts = self._layers[layer]
        assert experts is not None
        codes = metas = None
        if slot.q8 is not None:
            codes, metas = slot.q8.view(torch.int8), slot.q8.view(torch.int32).view(-1)[self._hidden // 4 :]
        publish_kernel(
            (len(x),),
            x,
            ids,
            weights,
            experts.expert_map if expert_map is None else expert_map,
            on_gpu,
            codes,
            metas,
            slot.f32,
            slot.ids,
            slot.weights,
            request,
            answer,
            steps,
            self._ticket,
            self._present[layer % 2],
            self._waits[layer % 2],
            self._hidden,
            self._top_k,
            row_stride(ids, weights, on_gpu),
            self._size,
            next_power_of_2(self._top_k),
            pdl(),
            num_warps=max(1, min(8, self._size // 256)),
            launch_pdl=pdl(),
            enable_fp_fusion=False,  # the rounding of store_row is two steps
        )

    def _make_native(self, some: list[CpuExperts], timeout_s: float) -> _C.Handoff:
        experts = max((e.gate.experts for e in some), default=1)
        routes, width = self._max_tokens * self._top_k, max((e.down.cols for e in some), default=32)
        into_down = [e.down.integer for e in some]
        self._h = Activations(routes, width, f32=not all(into_down), q8=any(into_down))
        self._sorted = [torch.empty(size, dtype=torch.int32) for size in (experts + 1, experts + 1, routes)]
        even, odd = self._region.slots
        starts, active, sorted_routes = (t.data_ptr() for t in self._sorted)
        return _C.Handoff(
            self._stream.native,
            [
                _native_layer(e, token_counts)
                for e, token_counts in zip(self._layers, self._token_counts, strict=True)
            ],
            self._region.requests.data_ptr(),
            self._region.answers.data_ptr(),
            even.native(self._hidden),
            odd.native(self._hidden),
            self._h.native,
            starts,
            active,
            sorted_routes,
            max_tokens=self._max_tokens,
            top_k=self._top_k,
            timeout_s=timeout_s,
        )


def _native_layer(experts: CpuExperts | None, token_counts: Tensor) -> _C.HandoffLayer:
    if experts is None:
        return _C.HandoffLayer(None, None, None, 0)
    biases = [0, 0, 0] if experts.biases is None else [bias.data_ptr() for bias in experts.biases]
    form = form_of(experts.activation, experts.limit, experts.alpha)
    return _C.HandoffLayer(
        *experts.matrices, token_counts.data_ptr(), form.activation, form.limit, form.alpha, *biases
    )


def _check_shapes(layers: Sequence[CpuExperts | None], hidden: int, max_tokens: int) -> None:
    if hidden % 32 or not 0 < max_tokens < 1 << 20:
        raise ValueError(f"hidden {hidden} must be a multiple of 32, max_tokens {max_tokens} below {1 << 20}")
    for index, e in enumerate(layers):
        if e is None:
            continue
        shapes = [(m.experts, m.rows, m.cols) for m in e.matrices]
        ff = e.down.cols
        expected = [(e.gate.experts, ff, hidden)] * 2 + [(e.gate.experts, hidden, ff)]
        if shapes != expected:
            raise ValueError(f"layer {index}: experts of shapes {shapes}, not {expected}")
    widths = {e.down.cols for e in layers if e is not None}
    if len(widths) > 1:
        raise ValueError(f"layers of different widths: {sorted(widths)}")
