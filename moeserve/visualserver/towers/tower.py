"""The base of all towers: their device, their number formats, and the handling of overflow and of missing memory."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from moeserve.errors import UserError
from moeserve.kernels import block_float
from moeserve.models.sources.source import TensorSource
from moeserve.placement.engine_memory import CUDA_CONTEXT_BYTES
from moeserve.processes.cpus import usable_cpus
from moeserve.visualserver.freed_memory import return_freed_memory
from moeserve.visualserver.shapes.shape import TowerShape
from moeserve.visualserver.towers.attention_backend import AttentionBackend
from moeserve.visualserver.towers.weights import InputFormat, TowerWeights

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

CPU: Final = torch.device("cpu")
# Of products on a GPU: tensor cores multiply 16 bits at more than ten times the rate of float32.
GPU_INPUTS: Final = InputFormat.FLOAT16

SliceEnded = Callable[[float], None]  # called with the fraction of the picture that is encoded

log = logging.getLogger(__name__)


class TowerMemoryError(UserError):
    """The GPU's memory does not suffice."""

    def __init__(self) -> None:
        super().__init__(
            "the GPU's memory does not suffice for the vision tower and a picture; lower --image-max-tokens, or say "
            "--mmproj-device cpu"
        )


def _goes_on(progress: float) -> None:
    """Does nothing: no other work waits for the device."""


class Tower(ABC):
    """A vision tower. Only the visual server's encoding thread uses it. On the CPU all numbers are float32, or the
    inputs of products and attention in block floating point. On a GPU, products and attention take float16 and
    accumulate in float32; the sums between them, and norms, stay float32."""

    def __init__(
        self,
        source: TensorSource,
        shape: TowerShape,
        device: torch.device,
        inputs: InputFormat | None = None,
    ) -> None:
        """Reads all weights onto `device`. inputs: format of the products' inputs, see `TowerWeights`; None: float16 on
        a GPU, float32 on the CPU."""
        if inputs is None:
            inputs = GPU_INPUTS if device.type == "cuda" else InputFormat.FLOAT32
        self.device = device
        self.weights = TowerWeights(source, shape.tensor_shapes(), device, inputs)
        self._side = shape.token_side
        self._patch = shape.patch
        self._backend = AttentionBackend(shape.layers, shape.hidden)
        self._launched: deque[torch.cuda.Event] = deque()  # ends of slices that may be unfinished
        self._threads = usable_cpus()

    def warm(self, max_tokens: int) -> int:
        """Encodes a picture of zeros. On the CPU the picture is small; torch loads and allocates things at the first
        picture. On a GPU it has `max_tokens` tokens, so that torch keeps the memory that a picture takes. Returns the
        bytes of GPU memory that the process holds then. Raises TowerMemoryError."""
        rows = math.isqrt(max_tokens) if self.device.type == "cuda" else 4
        columns = max_tokens // rows if self.device.type == "cuda" else 4
        self.encode(np.zeros((rows * self._side, columns * self._side, 3), np.uint8))
        if self.device.type == "cpu":
            return 0
        return torch.cuda.memory_reserved(self.device) + CUDA_CONTEXT_BYTES

    def encode(
        self, pixels: Pixels, slice_ended: SliceEnded = _goes_on
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Encodes a picture, or two frames of a video. pixels: [height, width, 3], sides multiples of
        `shape.token_side`; or [2, height, width, 3] for two frames, if `shape.frame_rule` has a rule.
        slice_ended: called after each layer's attention and between layers. Returns [tokens,
        shape.embedding_size], row by row. Raises TowerMemoryError."""
        try:
            return self._encoded(pixels, slice_ended)
        except torch.cuda.OutOfMemoryError:
            log.debug("a picture's memory is not there: once more without the blocks of other sizes")
        finally:
            if self.device.type == "cpu":
                return_freed_memory()
        torch.cuda.empty_cache()
        try:
            return self._encoded(pixels, slice_ended)
        except torch.cuda.OutOfMemoryError as error:
            raise TowerMemoryError from error

    def wait(self, behind: int) -> None:
        """See `SliceDevice`."""
        if self.device.type == "cpu":
            return
        # The thread sleeps instead of spinning: the worker may need its core.
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._launched.append(event)
        while len(self._launched) > behind:
            self._launched.popleft().synchronize()

    def used_s(self) -> float:
        """See `SliceDevice`. A GPU counts as used all the time, because a process's part of it cannot be measured."""
        if self.device.type == "cpu":
            return time.process_time() / self._threads
        return time.monotonic()

    @property
    def stops_steps(self) -> bool:
        """See `SliceDevice`."""
        return self.device.type != "cpu"

    def _encoded(self, pixels: Pixels, slice_ended: SliceEnded) -> np.ndarray[Any, np.dtype[np.float32]]:
        with torch.inference_mode():
            at = self._to_device(pixels)
            tokens = self._on_device(at, slice_ended)
            if self.weights.is_narrow and not bool(tokens.isfinite().all()):
                log.warning("a picture exceeds float16: the vision tower computes in float32 from now on")
                self.weights.widen()
                tokens = self._on_device(at, slice_ended)
            return self._to_host(tokens)

    def _to_device(self, pixels: Pixels) -> Tensor:
        if self.device.type == "cpu":
            return torch.from_numpy(pixels.copy())
        # Pinned memory, of which torch keeps the blocks: 8 MB a millisecond come from other memory, 50 from this.
        staged = torch.empty(pixels.shape, dtype=torch.uint8, pin_memory=True)
        staged.numpy()[...] = pixels
        return staged.to(self.device, non_blocking=True)

    def _to_host(self, tokens: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
        if self.device.type == "cpu":
            return tokens.float().numpy()
        found = torch.empty(tokens.shape, dtype=torch.float32, pin_memory=True)
        return found.copy_(tokens).numpy()

    def _on_device(self, pixels: Tensor, slice_ended: SliceEnded) -> Tensor:
        if not pixels.is_cuda:
            return self._tokens(pixels, slice_ended)
        patches = pixels.shape[-3] * pixels.shape[-2] // self._patch**2
        # A kernel that does not support the numbers' type leaves them to the next one (cuDNN's does not support
        # float32).
        with sdpa_kernel(self._backend.order(patches), set_priority=True):
            return self._tokens(pixels, slice_ended)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Attention in which all patches see each other. q, k, v: [heads, patches, dim] of `weights.dtype`; scale: 1 /
        sqrt(dim) if None. Returns [patches, heads * dim]."""
        if self.weights.is_block_float and block_float.takes_heads(q.shape[-1]):
            return block_float.attention(q, k, v, scale)
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale)[0]
        return mixed.transpose(0, 1).flatten(1)

    @abstractmethod
    def _tokens(self, pixels: Tensor, slice_ended: SliceEnded) -> Tensor:
        """See `encode`. pixels: uint8 on `device`. Returns a tensor on `device`, of any float type."""
