"""Gemma 4 on a GPU beside the CPU engine: layers whose heads differ, norms behind blocks, a feed-forward beside the
experts, capped logits. The weights are random; `test_families_gpu.py` has the distance from the truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from tests.kernels.gpu.gpu_model import TOKENS, GpuModel  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.embed.reference import EMBEDDED
from moeserve.models.blocks.cpu.decoder import CpuDecoder
from moeserve.models.blocks.cpu.workspace import CpuBatch
from tests.conftest import OWN_FIXTURES
from tests.kernels.engines.model_engine import Engine
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse
from tests.support.models.gemma_file import write_gemma


def assert_near(found: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    assert nmse(found, expected) < error
    assert expected.abs().max() > 5  # of a cap of 30: it tells


@pytest.mark.slow
def test_a_token_with_half_of_the_experts_in_ram(tmp_path: Path) -> None:
    model = write_gemma(tmp_path / "gemma.gguf", Type.F32)
    expected = Engine(stream_of(ISAS[-1]), model).logits(TOKENS[:1])
    assert_near(GpuModel(model, [1, 2]).logits(0, 1, tiled=False), expected, 1e-6)


@pytest.mark.slow  # 40 seconds of CPU time each
@pytest.mark.parametrize(("kind", "error"), [(Type.F32, 1e-6), (Type.Q8_0, 2e-3)], ids=["F32", "Q8_0"])
@pytest.mark.parametrize("in_ram", [[], [1, 2]], ids=["all on the GPU", "half of the experts in RAM"])
def test_a_gpu_computes_what_the_cpu_engine_does(
    in_ram: list[int], kind: Type, error: float, tmp_path: Path
) -> None:
    """A prompt, its next tokens together, and one by itself. Int8 activations differ by what they round."""
    model = write_gemma(tmp_path / "gemma.gguf", kind)
    expected = Engine(stream_of(ISAS[-1]), model).logits(TOKENS)
    gpu = GpuModel(model, in_ram)
    assert_near(gpu.logits(0, 18, tiled=True), expected[:18], error)
    assert_near(gpu.logits(18, 21, tiled=False), expected[18:21], error)
    assert_near(gpu.logits(21, 22, tiled=False), expected[21:], error)


@pytest.mark.slow  # 20 seconds of CPU time
def test_inputs_of_layers_and_keys_of_earlier_ones() -> None:
    """A prompt, its next tokens together, and one by itself, of a model like E2B."""
    model = OWN_FIXTURES / "tiny-gemma4e-f16.gguf"
    expected = Engine(stream_of(ISAS[-1]), model).logits(TOKENS[:12])
    gpu = GpuModel(model, [])
    assert [layer.kv_from for layer in gpu.shape.layers] == [None, None, 0, 1]
    assert_near(gpu.logits(0, 9, tiled=True), expected[:9], 2e-6)
    assert_near(gpu.logits(9, 11, tiled=False), expected[9:11], 2e-6)
    assert_near(gpu.logits(11, 12, tiled=False), expected[11:], 2e-6)


@pytest.mark.slow  # 10 seconds of CPU time
def test_rows_of_embeddings_with_the_padding_tokens_inputs() -> None:
    """Four rows of a picture in a prompt of a model like E2B."""
    stream, model = stream_of(ISAS[-1]), OWN_FIXTURES / "tiny-gemma4e-f16.gguf"
    gpu, cpu = GpuModel(model, []), Engine(stream, model).model
    rows = torch.randn(4, gpu.shape.embedding_size, generator=torch.Generator().manual_seed(3))
    tokens = [*TOKENS[:3], *[EMBEDDED] * 4, *TOKENS[7:9]]
    expected = embedded_logits(stream, cpu, tokens, [(3, rows)])
    found = gpu.logits(0, len(tokens), tiled=True, tokens=tokens, embedded=[(3, rows)])
    assert_near(found, expected, 2e-6)


def embedded_logits(
    stream: CpuStream, model: CpuDecoder, tokens: list[int], embedded: list[tuple[int, torch.Tensor]]
) -> torch.Tensor:
    """float32 [len(tokens), vocab]: those of the CPU's decoder, in one step."""
    n = len(tokens)
    numbers = torch.arange(n, dtype=torch.int32)
    table = numbers.numpy()[None].copy()
    ids = torch.tensor([0 if token == EMBEDDED else token for token in tokens], dtype=torch.int32)
    model.begin(ids, embedded=embedded)
    model.plan_attention(*(np.array([value], np.int32) for value in (0, n, 0, 0)), table)
    model.forward(CpuBatch(n=n, positions=numbers, kv_slots=numbers.clone()))
    logits = model.logits(numbers)
    stream.wait()
    return logits.clone()


@pytest.mark.slow  # a minute of CPU time
def test_windowed_layers_with_kv_slots_of_their_own(tmp_path: Path) -> None:
    """A prompt, its next tokens together, and one by itself, whose slots are written anew behind their window."""
    model = write_gemma(tmp_path / "gemma.gguf", Type.F32)
    one, two = GpuModel(model, []), GpuModel(model, [], window_slots=20)
    for start, end, tiled in ((0, 18, True), (18, 21, False), (21, 22, False)):
        assert torch.equal(two.logits(start, end, tiled=tiled), one.logits(start, end, tiled=tiled))
