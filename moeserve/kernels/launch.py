"""Launching Triton kernels at a few microseconds a call.

Triton's own `kernel[grid](...)` binds and specialises its arguments anew at every call. Here the compiled kernel is
found by what can make it another one: the compile-time arguments, the tensors' types and alignment, the launch options
(the idea is FlagGems' LibEntry). Kernels take no runtime integers, which Triton would specialise on: an argument is a
tensor or compile-time. So all that serving can launch is known before it begins: `compile_ahead`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.errors import OutOfResources

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# For kernels: inline assembly, which the interpreter lacks, only where they are compiled.
COMPILED = tl.constexpr(not INTERPRETED)
DEFAULT_STAGES = 3  # Triton's

HOPPER_SHARED_MEMORY = 227 << 10  # bytes that a program may have


@cache
def shared_memory() -> int:
    """Bytes that a program may have on this process's GPU."""
    if INTERPRETED or not torch.cuda.is_available():
        return HOPPER_SHARED_MEMORY
    return int(driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"])


def _has_dependent_launch() -> bool:
    if INTERPRETED or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


# Programmatic dependent launch (Hopper on): a kernel may start while the one before it ends, and waits itself
# (gdc_wait) before it reads what that one wrote. None: the GPU has not been asked yet.
PDL: bool | None = None


def pdl() -> bool:
    """Whether kernels are launched so. Asks the GPU at the first launch: a process that has imported kernels may still
    fork others, which it could not once it has asked."""
    global PDL
    if PDL is None:
        PDL = _has_dependent_launch()
    return PDL


def next_power_of_2(n: int) -> int:
    """The least power of two that is no less than `n` > 0; Triton's tensors have such lengths."""
    return 1 << (n - 1).bit_length()


def load(compiled: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Onto the current GPU; returns what launches it there on `grid`. Raises OutOfResources whenever it does not fit; a
    lookup of `compiled.run` would raise only the first time."""
    launched: Callable[..., None] = compiled[(*grid, 1, 1)[:3]]
    return launched


class Kernel:
    """A jitted function that is launched as kernel(grid, *arguments in order, num_warps=, num_stages=, ...)."""

    def __init__(self, function: Any) -> None:
        # Under the interpreter, `function` is its InterpretedFunction, without a cache.
        self.function = function
        _kernels.append(self)
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(self, grid: tuple[int, ...], *arguments: object, **options: Any) -> None:
        kinds = [(a.dtype, a.data_ptr() & 15) if isinstance(a, torch.Tensor) else a for a in arguments]
        self.launch((*kinds, *options.values()), grid, arguments, options)

    def launch(
        self,
        kind: tuple[object, ...],
        grid: tuple[int, ...],
        arguments: tuple[object, ...],
        options: dict[str, Any],
    ) -> None:
        """kind: all that can make it another compiled kernel, but for the device."""
        global _first_launches
        device = -1 if INTERPRETED else torch.cuda.current_device()
        key = (device, kind)
        found = self._compiled.get(key)
        if _ahead is not None:
            if found is None:
                _ahead.add(self, key, grid, arguments, options)
            return
        if found is None:
            _first_launches += 1
        if found is None or INTERPRETED:
            self._compiled[key] = self._launch_first(grid, arguments, options) or True
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        found.run(x, y, z, stream, found.function, found.packed_metadata, None, None, None, *arguments)

    def _launch_first(
        self, grid: tuple[int, ...], arguments: tuple[object, ...], options: dict[str, Any]
    ) -> Any:
        try:
            return self.function[grid](*arguments, **options)
        except OutOfResources as error:
            compiled = self.with_fewer_stages(grid, arguments, options, error)
            load(compiled, grid)(*arguments)
            return compiled

    def with_fewer_stages(
        self,
        grid: tuple[int, ...],
        arguments: tuple[object, ...],
        options: dict[str, Any],
        error: OutOfResources,
    ) -> Any:
        """The compiled kernel, loaded onto a GPU whose programs have less shared memory than those for which its tiles
        were chosen: with fewer of them on their way. Raises `error` where it does not fit so either."""
        for stages in range(options.get("num_stages", DEFAULT_STAGES) - 1, 0, -1):
            fewer = options | {"num_stages": stages}
            try:
                compiled = self.function.warmup(*arguments, grid=grid, **fewer)
                load(compiled, grid)
            except OutOfResources:
                continue
            return compiled
        raise error

    def note(self, key: tuple[object, ...], compiled: Any) -> None:
        """Stores the compiled kernel for later launches of this kind."""
        self._compiled[key] = compiled


def hash_sources() -> None:
    """Makes the hashes of all kernels imported so far, and of Triton, by which compiled ones are found on disk: half a
    second and more, and all that a process can do for the kernels without a GPU."""
    if not INTERPRETED:
        triton_key()
        for one in _kernels:
            one.function.cache_key  # noqa: B018 - a property that is made once


_kernels: list[Kernel] = []
_first_launches = 0  # of kinds that no `compile_ahead` has seen
_ahead: _CompilingAhead | None = None


def first_launches() -> int:
    """How many launches so far had to compile their kernel, or load it from Triton's cache on disk."""
    return _first_launches


def is_compiling_ahead() -> bool:
    """Whether launches run nothing now; see `compile_ahead`."""
    return _ahead is not None


@contextmanager
def compile_ahead(on_progress: Callable[[int, int], object] = lambda done, total: None) -> Iterator[None]:
    """Within, a launch runs nothing: its kernel is compiled by threads, all cores at once, unless it has been. At the
    end all are, and are on the device. Raises what a compilation raised.

    on_progress: kernels compiled so far, and in all, of which more become known on the way. ValueError if nested.
    """
    global _ahead
    if _ahead is not None:
        raise ValueError("compile_ahead is no reentrant context")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compile") as threads:
        mode = triton.AsyncCompileMode(threads)
        with mode:
            _ahead = ahead = _CompilingAhead(mode, on_progress)
            try:
                yield
                ahead.wait()
            finally:
                _ahead = None
    ahead.load()


class _Wanted(NamedTuple):
    """A launch whose kernel is on its way."""

    of: Kernel
    key: tuple[object, ...]
    compiled: Any
    grid: tuple[int, ...]
    arguments: tuple[object, ...]
    options: dict[str, Any]

    def loaded(self) -> Any:
        found = self.compiled.result() if isinstance(self.compiled, triton.FutureKernel) else self.compiled
        try:
            load(found, self.grid)
        except OutOfResources as error:
            return self.of.with_fewer_stages(self.grid, self.arguments, self.options, error)
        return found


class _CompilingAhead:
    """Kernels on their way. Several kinds of launches may be one kernel to Triton, which compiles it once."""

    def __init__(self, mode: triton.AsyncCompileMode, on_progress: Callable[[int, int], object]) -> None:
        self._mode = mode
        self._wanted: list[_Wanted] = []
        self._on_progress = on_progress

    def add(
        self,
        of: Kernel,
        key: tuple[object, ...],
        grid: tuple[int, ...],
        arguments: tuple[object, ...],
        options: dict[str, Any],
    ) -> None:
        compiled = True if INTERPRETED else of.function.warmup(*arguments, grid=grid, **options)
        of.note(key, compiled)  # so that it is not added again; replaced before any launch
        self._wanted.append(_Wanted(of, key, compiled, grid, arguments, options))
        self._tell()

    def wait(self) -> None:
        for _ in as_completed(self._mode.raw_futures):
            self._tell()

    def load(self) -> None:
        """Onto the device."""
        for wanted in self._wanted:
            if wanted.compiled is not True:
                wanted.of.note(wanted.key, wanted.loaded())

    def _tell(self) -> None:
        futures = self._mode.raw_futures
        self._on_progress(sum(future.done() for future in futures), len(futures))


def kernel(function: Any) -> Kernel:
    """Decorator: `@kernel` on a Triton function with neither default values nor runtime scalars."""
    return Kernel(triton.jit(function))


def row_stride(first: torch.Tensor, *others: torch.Tensor | None) -> int:
    """Between the rows of matrices that lie alike, each row contiguous. ValueError where they do not."""
    for tensor in (first, *others):
        if tensor is not None and tensor.stride() != (first.stride(0), 1):
            raise ValueError(f"strides {tensor.stride()} where {(first.stride(0), 1)} are expected")
    return first.stride(0)
