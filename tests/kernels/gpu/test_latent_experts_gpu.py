"""Experts between two matrices, narrower than the model (Nemotron 3 Super's), on a GPU beside the CPU engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.gpu.gpu_model import TOKENS, GpuModel  # isort: skip  (first: it sets up the interpreter)
from tests.conftest import OWN_FIXTURES
from tests.kernels.engines.model_engine import Engine
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse
from tests.support.models.cut_layers import write_layers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention, and experts with a shared one beside them."""
    whole = OWN_FIXTURES / "tiny-nemotronhlatent-f16.gguf"
    return write_layers(whole, tmp_path_factory.mktemp("model") / "latent.gguf", [2, 3])


@pytest.fixture(scope="module")
def expected(model: Path) -> torch.Tensor:
    return Engine(stream_of(ISAS[-1]), model).logits(TOKENS[:12])


@pytest.mark.slow  # half a minute of CPU time each
@pytest.mark.parametrize("in_ram", [[], [1, 2, 5]], ids=["all on the GPU", "some experts in RAM"])
def test_a_gpu_computes_what_the_cpu_engine_does(
    in_ram: list[int], model: Path, expected: torch.Tensor
) -> None:
    """A prompt, its next tokens together, and one by itself."""
    gpu = GpuModel(model, in_ram)
    assert gpu.shape.latent_expert_width == 32
    assert nmse(gpu.logits(0, 9, tiled=True), expected[:9]) < 1e-6
    assert nmse(gpu.logits(9, 11, tiled=False), expected[9:11]) < 1e-6
    assert nmse(gpu.logits(11, 12, tiled=False), expected[11:]) < 1e-6
