"""How a CUDA stream waits for the CPU's answer: by a memory operation of the driver, or by a kernel that polls."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.kernels import _C
from moeserve.kernels.handoff.triton import poll_kernel

log = logging.getLogger(__name__)

Wait = Callable[[Tensor], None]  # queues a wait until the first word of a line of answers is 1


def wait_by_driver(answer: Tensor) -> None:
    """Raises RuntimeError where the driver refuses."""
    address, error = _C.cuda_device_address(answer.data_ptr())
    error = error or _C.cuda_stream_wait_value(torch.cuda.current_stream().cuda_stream, address, 1)
    if error:
        raise RuntimeError(error)


def wait_by_polling(answer: Tensor) -> None:
    poll_kernel((1,), answer, num_warps=1)


def choose_wait(answer: Tensor, device: torch.device, *, polling: bool) -> Wait:
    """`answer`: pinned, to try it with; it is 0 again afterwards."""
    if device.type != "cuda" or polling:
        return wait_by_polling
    answer.fill_(1)
    try:
        _replay_a_wait(answer)
    except RuntimeError as error:
        log.warning(
            "the GPU driver refuses stream memory operations (%s): a polling kernel waits for the CPU's experts",
            error,
        )
        return wait_by_polling
    finally:
        answer.fill_(0)
    return wait_by_driver


def _replay_a_wait(answer: Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wait_by_driver(answer)
    graph.replay()
    torch.cuda.synchronize()
