"""Gemma 4 on a GPU beside the CPU engine: layers whose heads differ, norms behind blocks, a feed-forward beside the
experts, capped logits. The weights are random; `test_families_gpu.py` has the distance from the truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.attention.op import prefill_tiles
from moeserve.kernels.handoff import ExpertHandoff
from moeserve.kv.cache import KvCache
from moeserve.kv.layout import KvLayout
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.blocks.gpu.workspace import GpuBatch
from moeserve.models.loading.gpu_loader import GpuLoader
from moeserve.models.loading.ram_experts import load_ram_experts
from moeserve.models.open import open_model
from moeserve.models.registry import read_shape
from tests.conftest import OWN_FIXTURES
from tests.kernels.model_engine import Engine
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse
from tests.support.gemma_file import VOCAB, write_gemma

TOKENS = [(37 * i * i + 11 * i) % VOCAB for i in range(22)]
LENGTH = 32


class GpuModel:
    """A model on the device, driven by hand: one sequence, whose KV is in the slots of its positions."""

    def __init__(self, model: Path, in_ram: list[int], window_slots: int = 0) -> None:
        """in_ram: experts of each layer. window_slots: of windowed layers, which positions have in turn; 0: they have
        the others'."""
        source, device = open_model(model), torch.device(DEVICE)
        self.shape = shape = read_shape(source)
        ids = [[e for e in range(layer.num_experts) if e not in in_ram] for layer in shape.layers]
        weights = GpuLoader(source, shape, device, lambda *_: None).load(ids)
        kv = KvCache(
            KvLayout(shape),
            LENGTH,
            range(shape.num_layers),
            device,
            zeroed=True,
            num_window_slots=window_slots,
        ).layers
        table = torch.zeros(2, LENGTH, dtype=torch.int32, device=device)
        windows = torch.zeros_like(table) if window_slots else None
        self._window_slots = window_slots
        self.handoff = None
        if in_ram:
            stream = stream_of(ISAS[-1])
            experts = load_ram_experts(
                stream, source, shape, [in_ram] * shape.num_layers, device, lambda *_: None
            )
            self.handoff = ExpertHandoff(stream, experts.layers, 32, shape.hidden_size, shape.top_k, device)
        self.decoder = GpuDecoder(shape, weights, kv, table, 32, LENGTH, self.handoff, window_table=windows)

    def logits(self, start: int, end: int, *, tiled: bool) -> torch.Tensor:
        """Logits of the positions from `start` below `end`, in one step. tiled: as a prompt's; otherwise each position
        attends by itself, a single one as new tokens do."""
        n = end - start
        size = next(size for size in self.decoder.sizes if size >= n)
        positions, padding = list(range(start, end)), [0] * (size - n)
        batch = GpuBatch(
            counter(n),
            ints(TOKENS[start:end] + padding),
            ints(positions + padding),
            ints(positions + [-1] * len(padding)),
            ints([0] * n + [1] * len(padding)),
            0 if tiled else size,
            self._tiles(start, n) if tiled else None,
            rows_independent=n == 1,
            window_slots=self._windows(positions, len(padding)),
        )
        self.decoder.begin(batch)
        self.decoder.forward(batch)
        logits = self.decoder.logits(size, ints(list(range(n)) + padding), counter(n))[:n].cpu().clone()
        self.decoder.check()
        return logits

    def _windows(self, positions: list[int], padding: int) -> torch.Tensor | None:
        if not self._window_slots:
            return None
        return ints([position % self._window_slots for position in positions] + [-1] * padding)

    def _tiles(self, start: int, n: int) -> tuple[torch.Tensor, ...]:
        row, count, position, request = (np.array([value], np.int32) for value in (0, n, start, 0))
        tiles = [
            prefill_tiles(row, count, position, request, form.num_heads, form.num_kv_heads, form.head_dim)
            for form in self.shape.forms
        ]
        return tuple(torch.from_numpy(each).to(DEVICE) for each in tiles)


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


@pytest.mark.slow  # a minute of CPU time
def test_windowed_layers_with_kv_slots_of_their_own(tmp_path: Path) -> None:
    """A prompt, its next tokens together, and one by itself, whose slots are written anew behind their window."""
    model = write_gemma(tmp_path / "gemma.gguf", Type.F32)
    one, two = GpuModel(model, []), GpuModel(model, [], window_slots=20)
    for start, end, tiled in ((0, 18, True), (18, 21, False), (21, 22, False)):
        assert torch.equal(two.logits(start, end, tiled=tiled), one.logits(start, end, tiled=tiled))
