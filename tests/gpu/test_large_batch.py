"""Steps whose weights are unpacked first, on a GPU: no farther from the truth than llama.cpp either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.kernels.experts.large_batch import large_batch_down
from moeserve.kv.layout import KvLayout
from moeserve.models import step_buffers
from moeserve.models.open import open_model
from moeserve.models.registry import read_shape
from moeserve.placement import ModelSizes
from moeserve.worker.loading.load import load_runner
from tests.conftest import OWN_FIXTURES
from tests.gpu.driver import Driver, small_config
from tests.gpu.fixture_parity import check_distance
from tests.support.measuring.accuracy import Fixture

if not torch.cuda.is_available():  # before each of a thousand cases is collected
    pytest.skip("needs a GPU", allow_module_level=True)

PLACEMENTS: dict[str, dict[str, Any]] = {
    "all on the GPU": {},
    "half of the experts in RAM": {"num_gpu_experts": 4, "gpu_prefill_token_threshold": 1},
    "experts unpacked at the start": {"unpacked_experts": 1.0, "max_num_batched_tokens": 1024},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "golden",
    [path.with_suffix(".json") for path in sorted(OWN_FIXTURES.glob("tiny-*.golden.npz"))],
    ids=lambda path: path.stem,
)
def test_distance_from_the_truth(golden: Path, placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixtures' prompts are short: they pass for long ones."""
    monkeypatch.setattr(step_buffers, "UNPACK_ROWS", step_buffers.FLOAT32_ROWS)
    monkeypatch.setattr(step_buffers, "UNPACK_ROUTES", 1)
    fixture = Fixture.load(golden)
    model = golden.with_name(f"{fixture.name}.gguf")
    source = open_model(model)
    shape = read_shape(source)
    if PLACEMENTS[placement] and not shape.num_experts:
        pytest.skip("a model without experts")
    config = small_config(model, device="cuda", threads=4, **PLACEMENTS[placement])
    if config.unpacked_experts and not any(
        layer.unpacked for layer in ModelSizes.of(source.tensors, KvLayout(shape)).layers
    ):
        pytest.skip("experts of floats")
    driver = Driver(load_runner(config, lambda *_: None))
    check_distance(driver, fixture, 512, f"UNPACKED {fixture.name}, {placement}")


def test_smaller_steps_use_unpacked_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeserve.models.blocks.gpu.workspace.UNPACKED_EXPERTS_ROWS", 64)
    rows: list[int] = []  # of each product with unpacked experts

    def counted(h: torch.Tensor, *operands: Any, **options: Any) -> None:
        if options["unpacked"] is not None:
            rows.append(len(h))
        large_batch_down(h, *operands, **options)

    monkeypatch.setattr("moeserve.models.blocks.gpu.expert_run.large_batch_down", counted)
    fixture = Fixture.load(OWN_FIXTURES / "tiny-qwen3moe-q4_k_m.golden.json")
    options = PLACEMENTS["experts unpacked at the start"]
    config = small_config(OWN_FIXTURES / f"{fixture.name}.gguf", device="cuda", **options)
    check_distance(Driver(load_runner(config, lambda *_: None)), fixture, 512, f"UNPACKED {fixture.name}")
    assert rows
