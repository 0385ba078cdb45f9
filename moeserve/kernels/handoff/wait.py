"""How a CUDA stream waits for the CPU's answer: by a memory operation of the driver, where that works."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from moeserve.kernels import _C

log = logging.getLogger(__name__)


def wait_by_driver(answer: Tensor) -> None:
    """Queues a wait until the first word of a line of answers is 1. Raises RuntimeError where the driver refuses."""
    address, error = _C.cuda_device_address(answer.data_ptr())
    error = error or _C.cuda_stream_wait_value(torch.cuda.current_stream().cuda_stream, address, 1)
    if error:
        raise RuntimeError(error)


def driver_can_wait(answer: Tensor) -> bool:
    """Tries it, in a graph; says so in the log where it fails. `answer`: a pinned line, 0 again afterwards."""
    answer.fill_(1)
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wait_by_driver(answer)
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        log.warning(
            "the GPU driver refuses stream memory operations (%s): a kernel polls for the CPU's experts instead",
            error,
        )
        return False
    finally:
        answer.fill_(0)
    return True
