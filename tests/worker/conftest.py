"""For the tests of the worker: Triton's interpreter where there is no GPU, torch as in the worker."""

import tests.kernels.triton_device  # noqa: F401  # isort: skip  (first: whoever imports triton before it gets no interpreter)
import shutil
from pathlib import Path

import pytest

from tests.support.models.hugging_face_model import write_model
from tests.support.worker.torch_settings import gradients_for_the_next

__all__ = ["gradients_for_the_next"]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("folder") / "tiny-moe"
    write_model(folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(written, tmp_path / "tiny-moe"))
