"""For every kernel test: Triton's interpreter where there is no GPU, torch as in the worker."""

import tests.kernels.triton_device  # noqa: F401  # isort: skip  (first: whoever imports triton before it gets no interpreter)
from pathlib import Path

import pytest
import torch

from tests.support.models.hugging_face_model import write_model
from tests.support.worker.torch_settings import gradients_for_the_next

__all__ = ["gradients_for_the_next"]


@pytest.fixture(scope="session")
def of_floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of float32. Not to be changed."""
    folder = tmp_path_factory.mktemp("floats") / "tiny"
    shape = {"num_hidden_layers": 1, "hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 4}
    write_model(folder, torch.float32, **shape)
    return folder
