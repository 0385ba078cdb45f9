"""Few rows and wide matrices on a GPU, by the tensor cores: no farther from the truth than llama.cpp."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeserve.kernels.launch import warpgroups
from moeserve.kernels.linear import op, wide_matrices
from moeserve.kernels.linear.integers import DenseIntegers, IntegerRows
from moeserve.models import integer_buffers
from moeserve.models.step_buffers import SMALL_BATCH_ROWS
from moeserve.worker.loading.load import load_runner
from tests.conftest import OWN_FIXTURES
from tests.gpu.driver import Driver, small_config
from tests.gpu.fixture_parity import check_distance
from tests.support.measuring.accuracy import Fixture

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@pytest.mark.parametrize("chunk", [3, 8])
@pytest.mark.parametrize(
    ("name", "has_integers"), [("tiny-gemma3-q4_k_m", True), ("tiny-qwen3moe-q4_k_m", False)]
)
def test_distance_from_the_truth(
    name: str, has_integers: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixtures' matrices pass for wide ones: of Q4_K as integers on Hopper, others by sliced K.

    Qwen3-MoE's only dense matrix in Q4_K, that of the queries, is multiplied together with keys and values in Q8_0."""
    few: set[str] = set()  # what few rows launched
    run_gemm, multiply = op.run_gemm, DenseIntegers.multiply

    def sliced_k(x: torch.Tensor, *operands: Any, **options: Any) -> None:
        if x.dtype == torch.float32 and len(x) <= SMALL_BATCH_ROWS:
            few.add("sliced K")
        run_gemm(x, *operands, **options)

    def integers(self: DenseIntegers, x: IntegerRows, *operands: Any) -> None:
        if len(x.x) <= SMALL_BATCH_ROWS:
            few.add("integers")
        multiply(self, x, *operands)

    for module in (wide_matrices, integer_buffers):
        monkeypatch.setattr(module, "WIDE_COLUMNS", 0)
    monkeypatch.setattr(wide_matrices, "WIDE_ROWS", 0)
    monkeypatch.setattr(op, "run_gemm", sliced_k)
    monkeypatch.setattr(DenseIntegers, "multiply", integers)
    fixture = Fixture.load(OWN_FIXTURES / f"{name}.golden.json")
    config = small_config(OWN_FIXTURES / f"{name}.gguf", device="cuda")
    driver = Driver(load_runner(config, lambda *_: None))
    check_distance(driver, fixture, chunk, f"WIDE {name}, chunks of {chunk}")
    assert few == ({"integers", "sliced K"} if has_integers and warpgroups() else {"sliced K"})
