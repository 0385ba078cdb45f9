"""ExpertHandoff: a layer's experts on the CPU as three calls in a GPU stream.

    handoff.begin()                                     once a step, eager or replayed: the pool stands by
    for each layer:
        handoff.publish(layer, y, ids, weights)         queued on the current stream; the pool starts when it has run
        ... the GPU's own experts, meanwhile ...
        handoff.collect(layer, out)                     the stream waits for the pool; out = the sum of the CPU's
        experts
    torch.cuda.synchronize(); handoff.check()

The launches of `publish` and `collect` have constant arguments, so a CUDA graph that captured them can be replayed any
number of times. `begin` is a call from Python and not part of the graph.
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
    """A step's hand-off failed: the watchdog ended a hang, or a request was invalid. The results of the running
    steps are invalid, and the hand-off cannot be used any more."""


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """The experts of one layer that the CPU computes while the GPU computes the others: matrices in RAM, and the map
    from the layer's expert ids to them. ff: intermediate width."""

    gate: Matrix  # [E, ff, hidden], the E experts on the CPU, or slots for them
    up: Matrix  # [E, ff, hidden]
    down: Matrix  # [E, hidden, ff]
    expert_map: (
        # int32 [experts of the layer], on the GPU: an expert's index in the matrices, -1: not on the CPU
        Tensor
    )
    activation: Activation = "silu"
    # float32 [E, ff], [E, ff], [E, hidden] in RAM, contiguous: biases of the three products; None: no biases.
    biases: tuple[Tensor, Tensor, Tensor] | None = None
    limit: float | None = None  # limit of the activation: kernels/gating.py
    alpha: float = OAI_ALPHA
    num_on_disk: int = 0  # E, if the matrices have slots for fewer experts; 0: they have all

    @property
    def num_experts(self) -> int:
        return self.num_on_disk or self.gate.experts

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        return self.gate, self.up, self.down

    @property
    def own_matrices(self) -> tuple[Matrix, ...]:
        """The matrices without repetition: for experts without gates, `gate` is `up`."""
        return self.matrices[1:] if self.gate is self.up else self.matrices


class ExpertHandoff:
    """The hand-off for all layers of a model. Owns the shared memory and the watchdog; uses the stream's pool.

    From `begin` until the last layer's answer the pool belongs to the step; other operations on its stream run
    afterwards. Its threads spin while they wait for the next layer (after a millisecond with pauses); between steps
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
        disk: _C.DiskExperts | None = None,
    ) -> None:
        """layers: each layer's CPU experts; None for a layer without. max_tokens: rows of the largest step.

        device: of the tensors for `publish` and `collect`; "cpu" (Triton's interpreter) is for tests. timeout_s:
        time without progress, on either side, after which a step counts as hung; it must cover compilations between
        `begin` and the last layer, and a step's waits for a disk. disk: reads the experts of layers with slots, and
        numbers its layers like `layers`; None: all experts are in RAM.

        Raises ValueError for inconsistent shapes, RuntimeError if memory cannot be pinned.
        """
        _check_shapes(layers, hidden, max_tokens)
        self._stream, self._layers = stream, list(layers)
        self._hidden, self._top_k, self._max_tokens = hidden, top_k, max_tokens
        self._device = torch.device(device)
        self._size = next_power_of_2(hidden)
        some = [e for e in layers if e is not None]
        # Floats are gathered in the order of a matrix's columns, and rounded afterwards.
        inputs = [m.integer and not m.ordered for e in some for m in (e.gate, e.up)]
        self._region = Region(
            len(layers),
            max_tokens,
            hidden,
            top_k,
            floats=not all(inputs),
            integers=any(inputs),
            pinned=self._device.type == "cuda",
        )
        # On the device; see publish_kernel. `_present` and `_waits` have two rows, for even and for odd layers.
        self._steps = torch.zeros(len(layers), dtype=torch.int32, device=device)
        self._ticket = torch.zeros(1, dtype=torch.int64, device=device)
        self._present = torch.zeros(2, max_tokens, dtype=torch.int32, device=device)
        self._waits = torch.zeros(2, 4, dtype=torch.int32, device=device)
        most = max((e.num_experts for e in some), default=0)
        self._counts = torch.zeros(len(layers), 2 * most, dtype=torch.int64)
        experts = [0 if e is None else e.num_experts for e in layers]
        self._token_counts: list[Tensor] = [
            own[: 2 * count].view(2, count) for own, count in zip(self._counts, experts, strict=True)
        ]
        self._native: _C.Handoff | None = self._make_native(some, timeout_s, disk)

    def begin(self) -> None:
        """Prepares the pool for one step, in which every layer with CPU experts is published once, in order.

        Call it before or right after launching the step, once per execution, not during capture. Returns
        immediately; several steps may be in flight.
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
        """Launches the transfer of rows to the CPU, whose experts start at once.

        x: float32, bfloat16 or float16 [n, hidden]; ids: int32 [n, top_k], the layer's expert ids, negative: none
        (padding rows have only such ids); weights: float32 [n, top_k]. expert_map: overrides the layer's, if only some
        of its CPU experts are to be computed; -1 for the others. on_gpu: int32 [n, top_k], with the strides of ids, for
        experts that move while steps run: the GPU computes the routes with a value >= 0, whatever the map says. The
        GPU's kernels decide by the same values, so each route is computed once. All on the device; x contiguous, ids
        and weights contiguous or columns of wider tensors; n <= max_tokens. Routes to experts not on the CPU are
        skipped; if all are, the stream will not wait. Raises ValueError for a layer without CPU experts, or a number of
        rows outside 1 .. max_tokens.
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

    def collect(
        self, layer: int, out: Tensor, control: Tensor | None = None, fetched: Tensor | None = None
    ) -> None:
        """Launches the wait for the CPU; then out[i] = sum of weights[i, j] * expert(x[i]) over row i's CPU experts,
        zeros for a row without any. out: float32 [n, hidden], with the n of `publish`. control, fetched: of a layer
        whose missed experts are fetched in part (fetch.py): the wait corrects the share."""
        # Takes a third of the time of the driver's stream memory operation.
        answer, waits = self._region.answers[layer], self._waits[layer % 2]
        poll_kernel((1,), answer, waits, control, fetched, pdl(), num_warps=1, launch_pdl=pdl())
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
        """Raises HandoffError for an error found by the pool or the watchdog. Call it when the device has finished a
        step: after an error the stream continues with invalid results."""
        self._live()

    def expert_token_counts(self, layer: int) -> Tensor:
        """Returns int64 [2, E]: tokens routed to each CPU expert, and steps that read its weights, since start-up.
        The pool writes it: read it only between steps."""
        return self._token_counts[layer]

    def expert_reads(self, layers: npt.NDArray[np.bool_]) -> int:
        """Returns how many experts' weights steps have read since start-up in the `layers` (bool [layers]), each
        once per step, including the running step so far."""
        return self._live().expert_reads(layers)

    def close(self) -> None:
        """Ends the watchdog. A running step is abandoned, so that the device can finish it. May be called twice."""
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

    def _make_native(
        self, some: list[CpuExperts], timeout_s: float, disk: _C.DiskExperts | None
    ) -> _C.Handoff:
        experts = max((e.num_experts for e in some), default=1)
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
            disk=disk,
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
