"""The same hand-off written with copies and host functions, as rivals do it: what benchmarks/gpu/handoff.py compares.

A layer is: kernel -> copy to the host -> host function that starts the pool -> host function that waits for it -> copy
back. The pool, its memory, the kernel and what is computed are those of moeserve's own hand-off; one copy each way
takes all there is to take. The two functions are C, compiled here, so that no interpreter is in the way.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeserve.kernels.handoff import ExpertHandoff
from moeserve.kernels.handoff.region import Slot

SOURCE = """
#include <stdint.h>
typedef struct { volatile uint64_t* request; volatile uint32_t* answer; uint64_t wants; uint32_t step; } Layer;
void start(void* p) {
  Layer* l = p;
  *l->answer = 0;
  __sync_synchronize();
  *l->request = l->wants << 32 | ++l->step;
}
void finish(void* p) {
  Layer* l = p;
  while (*l->answer == 0) __builtin_ia32_pause();
}
"""


class _Layer(ctypes.Structure):
    _fields_ = (
        ("request", ctypes.c_void_p),
        ("answer", ctypes.c_void_p),
        ("wants", ctypes.c_uint64),
        ("step", ctypes.c_uint32),
    )


class HostFunctions:
    """Publishes and collects like `handoff`, for batches of n rows, each of which has an expert on the CPU."""

    def __init__(self, handoff: ExpertHandoff, n: int) -> None:
        self._handoff, self._n = handoff, n
        self._library = _compiled()
        self._driver = ctypes.CDLL("libcuda.so.1")
        region = handoff._region
        wants = n | 1 << 30
        steps = handoff._steps.tolist()
        self._layers = [
            _Layer(request.data_ptr(), answer.data_ptr(), wants, step)
            for request, answer, step in zip(region.requests, region.answers, steps, strict=True)
        ]
        # Where publish raises its flag instead.
        self._flags = torch.zeros(4, dtype=torch.int64, device="cuda")
        self._spans = [_span(region.memory, slot, n) for slot in region.slots]
        self._mirrors = [torch.empty_like(span, device="cuda") for span in self._spans]

    def publish(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        slot, mirror = self._handoff._region.slots[layer % 2], self._mirrors[layer % 2]
        staged = _moved(slot, self._spans[layer % 2], mirror)
        flags = self._flags
        self._handoff._launch_publish(
            layer, x, ids, weights, staged, flags, flags[1:].view(torch.int32), flags[2:].view(torch.int32)
        )
        self._spans[layer % 2].copy_(mirror, non_blocking=True)
        self._call("start", layer)

    def collect(self, layer: int, out: Tensor) -> None:
        self._call("finish", layer)
        out.copy_(self._handoff._region.slots[layer % 2].result[: self._n], non_blocking=True)

    def _call(self, name: str, layer: int) -> None:
        function: Any = getattr(self._library, name)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = self._driver.cuLaunchHostFunc(stream, function, ctypes.byref(self._layers[layer]))
        if error:
            raise RuntimeError(f"cuLaunchHostFunc: {error}")


def _compiled() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp())
    (folder / "host.c").write_text(SOURCE)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", "host.so", "host.c"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "host.so"))


def _span(memory: Tensor, slot: Slot, n: int) -> Tensor:
    """From the slot's first row to the last of n rows' weights: what one copy takes."""
    assert slot.q8 is not None
    first = slot.q8.data_ptr() - memory.data_ptr()
    last = slot.weights[:n].data_ptr() - memory.data_ptr() + slot.weights[:n].nbytes
    return memory[first:last]


def _moved(slot: Slot, span: Tensor, mirror: Tensor) -> Slot:
    """The slot's tensors, in the mirror."""

    def move(t: Tensor) -> Tensor:
        first = t.data_ptr() - span.data_ptr()
        return mirror[first : first + t.nbytes].view(t.dtype).view(-1, t.shape[1])

    assert slot.q8 is not None
    return Slot(move(slot.q8), None, move(slot.ids), move(slot.deferred), move(slot.weights), slot.result)
