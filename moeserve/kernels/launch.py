"""Launches Triton kernels in a few microseconds per call.

Triton's own `kernel[grid](...)` binds and specialises its arguments at every call. Here the compiled kernel is
looked up by everything that selects it: compile-time arguments, the tensors' dtypes and alignment, launch options
(the idea of FlagGems' LibEntry). Kernels take no runtime integers, on which Triton would specialise: an argument is
a tensor or a compile-time constant. So all kernels that serving needs are known in advance: `compile_ahead`.
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

from moeserve.kernels.l1_preference import loaded_for_l1

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# True if kernels are compiled. They then use inline assembly, which the interpreter lacks.
COMPILED = tl.constexpr(not INTERPRETED)
DEFAULT_STAGES = 3  # Triton's

HOPPER_SHARED_MEMORY = 227 << 10  # bytes per program
HOPPER_MULTIPROCESSORS = 132


@cache
def shared_memory() -> int:
    """Returns the shared memory per program, in bytes, on this process's GPU."""
    if INTERPRETED or not torch.cuda.is_available():
        return HOPPER_SHARED_MEMORY
    return int(driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"])


@cache
def multiprocessors() -> int:
    """Returns how many multiprocessors this process's GPU has."""
    if INTERPRETED or not torch.cuda.is_available():
        return HOPPER_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def _has_dependent_launch() -> bool:
    if INTERPRETED or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


# Programmatic dependent launch (from Hopper on): a kernel may start while the previous one ends, and waits (gdc_wait)
# before it reads that one's results. None: not yet determined.
PDL: bool | None = None


def pdl() -> bool:
    """Returns whether kernels use programmatic dependent launch. Asks the GPU at the first launch and not at import:
    a process that initialised the GPU could no longer fork."""
    global PDL
    if PDL is None:
        PDL = _has_dependent_launch()
    return PDL


# Whether kernels in Gluon for Hopper's warpgroups are used. None: not yet determined.
WARPGROUPS: bool | None = None
# Gluon is experimental: its names change between versions. Kernels were tried with this one.
GLUON_VERSION = "3.6."


def warpgroups() -> bool:
    """Returns whether this process's GPU is a Hopper GPU, and Triton the version that its kernels are written for."""
    global WARPGROUPS
    if WARPGROUPS is None:
        WARPGROUPS = (
            _has_dependent_launch()
            and torch.cuda.get_device_capability()[0] == 9
            and triton.__version__.startswith(GLUON_VERSION)
        )
    return WARPGROUPS


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least `n` > 0, as Triton's tensors need it."""
    return 1 << (n - 1).bit_length()


def load(compiled: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Loads a compiled kernel onto the current GPU. Returns a function that launches it on `grid`. Raises
    OutOfResources every time it does not fit; a look-up of `compiled.run` would raise only the first time."""
    launched: Callable[..., None] = compiled[(*grid, 1, 1)[:3]]
    return launched


def _kind(argument: object) -> object:
    """Returns the properties of an argument that select the compiled kernel; for a TMA descriptor, its box sizes and
    dtype."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() & 15
    boxes = getattr(argument, "block_shape", None)
    return argument if boxes is None else (tuple(boxes), argument.base.dtype)  # type: ignore[attr-defined]


class Kernel:
    """A jitted function that is launched as kernel(grid, *arguments in order, num_warps=, num_stages=, ...).

    Option prefers_l1: see l1_preference.py. It is heeded on Hopper, where it was measured.
    """

    def __init__(self, function: Any) -> None:
        # Under the interpreter, `function` is its InterpretedFunction, without a cache.
        self.function = function
        _kernels.append(self)
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(self, grid: tuple[int, ...], *arguments: object, **options: Any) -> None:
        kinds = [_kind(argument) for argument in arguments]
        self.launch((*kinds, *options.values()), grid, arguments, options)

    def launch(
        self,
        kind: tuple[object, ...],
        grid: tuple[int, ...],
        arguments: tuple[object, ...],
        options: dict[str, Any],
    ) -> None:
        """Launches the kernel. kind: everything that selects the compiled kernel, except the device."""
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
        prefers_l1, options = _without_preference(options)
        try:
            compiled = self.function[grid](*arguments, **options)
        except OutOfResources as error:
            compiled = self.with_fewer_stages(grid, arguments, options, error)
            load(compiled, grid)(*arguments)
        return loaded_for_l1(compiled) if prefers_l1 else compiled

    def with_fewer_stages(
        self,
        grid: tuple[int, ...],
        arguments: tuple[object, ...],
        options: dict[str, Any],
        error: OutOfResources,
    ) -> Any:
        """Returns the kernel compiled with fewer pipeline stages, for a GPU with less shared memory than its tiles
        were chosen for. Raises `error` if it still does not fit."""
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
        """Remembers a compiled kernel for later launches of this kind."""
        self._compiled[key] = compiled


def hash_sources() -> None:
    """Computes the hashes of all imported kernels and of Triton, by which compiled kernels are found on disk. It
    takes half a second or more, and is all that a process can prepare without a GPU."""
    if not INTERPRETED:
        triton_key()
        for one in _kernels:
            one.function.cache_key  # noqa: B018 - a property that is made once


_kernels: list[Kernel] = []
_first_launches = 0  # launches of kinds that `compile_ahead` has not seen
_ahead: _CompilingAhead | None = None


def first_launches() -> int:
    """Returns the number of launches so far that had to compile their kernel, or load it from Triton's disk cache."""
    return _first_launches


def is_compiling_ahead() -> bool:
    """Returns whether launches currently execute nothing; see `compile_ahead`."""
    return _ahead is not None


@contextmanager
def compile_ahead(on_progress: Callable[[int, int], object] = lambda done, total: None) -> Iterator[None]:
    """Returns a context in which launches execute nothing: their kernels are compiled in threads, on all cores, unless
    compiled already. At its end all kernels are compiled and on the device. Raises errors of compilation.

    on_progress: called with the number of compiled kernels and the total known so far. Raises ValueError if nested.
    """
    global _ahead
    if _ahead is not None:
        raise ValueError("compile_ahead cannot be nested")
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


def _without_preference(options: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Returns whether a launch prefers L1 and this GPU heeds it, and the options that Triton knows."""
    prefers_l1 = options.get("prefers_l1", False)
    return prefers_l1 and warpgroups(), {name: x for name, x in options.items() if name != "prefers_l1"}


class _Wanted(NamedTuple):
    """A launch whose kernel is being compiled."""

    of: Kernel
    key: tuple[object, ...]
    compiled: Any
    grid: tuple[int, ...]
    arguments: tuple[object, ...]
    options: dict[str, Any]
    prefers_l1: bool

    def loaded(self) -> Any:
        found = self.compiled.result() if isinstance(self.compiled, triton.FutureKernel) else self.compiled
        try:
            load(found, self.grid)
        except OutOfResources as error:
            found = self.of.with_fewer_stages(self.grid, self.arguments, self.options, error)
        return loaded_for_l1(found) if self.prefers_l1 else found


class _CompilingAhead:
    """Kernels being compiled. Several kinds of launches may need the same kernel, which Triton compiles once."""

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
        prefers_l1, options = _without_preference(options)
        compiled = True if INTERPRETED else of.function.warmup(*arguments, grid=grid, **options)
        of.note(key, compiled)  # so that it is not added again; replaced before any launch
        self._wanted.append(_Wanted(of, key, compiled, grid, arguments, options, prefers_l1))
        self._tell()

    def wait(self) -> None:
        for _ in as_completed(self._mode.raw_futures):
            self._tell()

    def load(self) -> None:
        """Loads the kernels onto the device."""
        for wanted in self._wanted:
            if wanted.compiled is not True:
                wanted.of.note(wanted.key, wanted.loaded())

    def _tell(self) -> None:
        futures = self._mode.raw_futures
        self._on_progress(sum(future.done() for future in futures), len(futures))


def kernel(function: Any) -> Kernel:
    """Makes a kernel from a Triton function with neither default values nor runtime scalars; use it as `@kernel`."""
    return Kernel(triton.jit(function))


def row_stride(first: torch.Tensor, *others: torch.Tensor | None) -> int:
    """Returns the row stride, in elements, that all these matrices [rows, columns] have; None entries are left out.
    Raises ValueError if their strides differ, or rows are not contiguous."""
    for tensor in (first, *others):
        if tensor is not None and tensor.stride() != (first.stride(0), 1):
            raise ValueError(f"strides {tensor.stride()} where {(first.stride(0), 1)} are expected")
    return first.stride(0)
