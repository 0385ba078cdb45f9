"""LoRA adapters on a GPU beside the CPU's engine, whose truth is PEFT (tests/kernels/adapters/test_adapters.py): three
of them and the model itself in the same steps, prompts and decode steps in CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.models.adapters.products import QKV_PARTS
from moeserve.models.open import open_model
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import names as n
from moeserve.worker.loading.load import load_runner
from moeserve.worker.runner import Runner
from tests.conftest import TINY_MODEL
from tests.gpu.driver import small_config
from tests.support.models.random_adapters import write_random_adapter
from tests.support.worker.adapter_steps import score_together, top_kl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ATTENTION = (*QKV_PARTS, n.ATTN_OUTPUT)
NAMES = ["all", "", "attention", "down"]  # of each prompt
PROMPTS = [
    [(37 * i * i + 11 * i + 5 * s) % 4000 for i in range(length)] for s, length in enumerate((60, 41, 50, 33))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, shape = tmp_path_factory.mktemp("adapters"), read_shape(open_model(TINY_MODEL))
    feed_forward = (n.FFN_GATE_INP, *n.EXPERT_PARTS)
    write_random_adapter(folder / "attention", shape, 8, 1, parts=ATTENTION, size=0.3)
    write_random_adapter(folder / "all", shape, 20, 2, parts=(*ATTENTION, *feed_forward), size=0.2)
    write_random_adapter(folder / "down", shape, 3, 3, parts=(n.FFN_DOWN_EXPS,), size=0.5)
    return folder


def runner_on(device: str, folder: Path) -> Runner:
    modules = tuple(f"{path.name}={path}" for path in sorted(folder.iterdir()))
    return load_runner(small_config(TINY_MODEL, device=device, lora_modules=modules), lambda *_: None)


def test_distance_from_the_cpu(folder: Path) -> None:
    """With adapters it is about that of the model itself, whichever kernels a step takes, and much less than what the
    adapters change."""
    cpu, gpu = runner_on("cpu", folder), runner_on("cuda", folder)
    expected = score_together(cpu, PROMPTS, NAMES, 64)
    plain = score_together(cpu, PROMPTS, [""] * len(NAMES), 64)
    for chunk in (64, 16, 7, 1):
        found = score_together(gpu, PROMPTS, NAMES, chunk)
        medians = {}
        for name, prompt, ours, theirs, base in zip(NAMES, PROMPTS, found, expected, plain, strict=True):
            positions = len(prompt) - 1  # what follows was decoded, perhaps differently
            kl = [top_kl(a, b) for a, b in zip(theirs[:positions], ours[:positions], strict=True)]
            far = float(np.median(list(map(top_kl, theirs[:positions], base[:positions]))))
            medians[name] = float(np.median(kl))
            print(
                f"LORA chunk {chunk:2} {name or 'base':9} median KL {medians[name]:.1e}, the adapter's {far:.1e}"
            )
            if name:
                assert medians[name] < 0.1 * far
        assert max(medians.values()) < 4 * medians[""]
