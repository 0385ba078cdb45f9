"""A kernel whose tiles want more shared memory than the GPU has is compiled with fewer of them on their way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

import tests.kernels.triton_device  # noqa: F401
from moeserve.kernels.launch import DEFAULT_STAGES, Kernel, load

A_STAGE = 1000  # bytes of shared memory


class Compiled(CompiledKernel):
    """As Triton has compiled it, to be loaded by Triton's own code onto a GPU of a few bytes."""

    def __init__(self, num_stages: int) -> None:
        self.metadata = SimpleNamespace(shared=A_STAGE * num_stages, num_warps=1)
        self.src = self.name = self.kernel = self.metadata_group = self.hash = None
        self.module = self.function = self._run = None
        self.stages = num_stages


class Function:
    """Compiles a kernel once for each number of stages; remembers for which it was asked."""

    cache_key = ""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._cache: dict[int, Compiled] = {}

    def warmup(self, *_: object, grid: object, num_stages: int = DEFAULT_STAGES, num_warps: int) -> Compiled:
        self.asked.append(num_stages)
        return self._cache.setdefault(num_stages, Compiled(num_stages))


def on_a_gpu_that_fits(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": stages * A_STAGE},
        load_binary=lambda *_: ("module", "function", 0, 0, 1024),
    )
    gpu = SimpleNamespace(
        get_current_device=lambda: 1000 + stages,  # Triton keeps each device's size
        get_current_target=lambda: SimpleNamespace(warp_size=32),
        launcher_cls=lambda source, metadata: print,
        utils=utils,
    )
    monkeypatch.setattr(driver, "_active", gpu)


def fewer(function: Function, **options: int) -> Compiled:
    error = OutOfResources(9, 1, "shared memory")
    found: Compiled = Kernel(function).with_fewer_stages((1,), (), options | {"num_warps": 1}, error)
    return found


def test_the_most_stages_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu_that_fits(2, monkeypatch)
    function = Function()
    found = fewer(function, num_stages=4)
    assert (found.stages, found.module, function.asked) == (2, "module", [3, 2])
    on_a_gpu_that_fits(1, monkeypatch)
    function = Function()
    assert (fewer(function).stages, function.asked) == (1, [2, 1])


def test_another_kind_of_launches_of_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernel raises when its `run` is looked up first, and later only when it is launched."""
    on_a_gpu_that_fits(2, monkeypatch)
    function = Function()
    assert [fewer(function, num_stages=5).stages for _ in range(2)] == [2, 2]
    too_large = Compiled(3)
    for _ in range(2):
        with pytest.raises(OutOfResources, match="Required: 3000"):
            load(too_large, (1,))


def test_a_kernel_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu_that_fits(0, monkeypatch)
    with pytest.raises(OutOfResources, match="Required: 9,"):
        fewer(Function(), num_stages=3)
