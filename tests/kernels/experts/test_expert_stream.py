"""Experts in RAM on their way to the GPU: all of a layer or the first of them, layer after layer, the hottest first."""

from __future__ import annotations

import json
from pathlib import Path

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.config import ServerConfig
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.planes import dequantize, empty_planes, repack
from moeserve.kernels.planes.from_panels import panels_to_planes
from moeserve.kernels.stream_operands import ThreadPlacement
from moeserve.models.loading.expert_stream import ExpertStream
from moeserve.models.loading.node_pieces import PieceUnpacker, pieces_of
from moeserve.models.loading.pinned_panels import PinnedPanels, panel_bytes
from moeserve.models.loading.ram_experts import load_ram_experts
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf import open_gguf
from moeserve.placement.placement import LayerPlacement, Placement
from moeserve.quantization import QUANT_TYPES
from moeserve.worker.loading.gpu.ram_expert_order import ram_expert_order
from tests.conftest import TINY_MODEL
from tests.kernels.experts.handoff_world import EXPERTS, HERE, Q8, Layer
from tests.kernels.weights import random_weights

FLOATS = (Type.BF16, Type.BF16, Type.F32)  # which the interpreter has soon unpacked


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_each_expert_is_streamed_or_left(nodes: int) -> None:
    """Steps of other counts one after another. Layer 1 has no experts in RAM. On four NUMA nodes the first of them has
    no panel of `down`."""
    stream = CpuStream([ThreadPlacement(node) for node in range(nodes)])
    layers = [
        Layer.random(stream, Q8, 0),
        None,
        Layer.random(stream, FLOATS, 10),
        Layer.random(stream, FLOATS, 20),
    ]
    in_ram = [None if layer is None else layer.experts for layer in layers]
    device = torch.device(DEVICE)
    experts = ExpertStream(in_ram, PinnedPanels(in_ram, device), device)
    for step in [(0, 0, 4, 4), (1, 0, 3, 2), (0, 0, 0, 0), (0, 0, 0, 1)]:
        experts.begin(step)
        for index, (layer, count) in enumerate(zip(layers, step, strict=True)):
            if layer is None:
                continue
            place = [HERE.index(e) if e in HERE else -1 for e in range(EXPERTS)]
            assert experts.left(index).tolist() == [p if p >= count else -1 for p in place]
            if not count:
                continue
            found = experts.take(index)
            for planes, weights in zip((found.gate, found.up, found.down), layer.weights, strict=True):
                for e in range(count):
                    assert torch.equal(dequantize(planes, e).cpu(), weights.values()[e])
            assert experts.expert_map(index).tolist() == [p if p < count else -1 for p in place]


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q6_K, Type.IQ2_XXS, Type.TQ1_0])
def test_one_node_after_another(kind: Type) -> None:
    """Each node's rows of the first two experts of three, in types with scales of scales and with codebooks."""
    weights = random_weights(kind, 3, 96, 256)
    matrix = weights.pack(CpuStream([ThreadPlacement(0), ThreadPlacement(1)]))
    panels = panel_bytes(matrix).clone().to(DEVICE)
    planes = empty_planes(QUANT_TYPES[kind], (3, 96, 256), DEVICE)
    pieces = pieces_of(matrix)
    assert [(piece.first_row, piece.rows) for piece in pieces] == [(0, 32), (32, 64)]
    third = planes.codes[2].clone()
    for piece in pieces:
        PieceUnpacker(panels[piece.start :], planes, piece).launch(2)
    for expert in range(2):
        assert torch.equal(dequantize(planes, expert).cpu(), weights.values()[expert])
    assert torch.equal(planes.codes[2], third)


def test_the_hottest_lie_first(tmp_path: Path) -> None:
    """In the order of an --expert-heat file, and so that each place holds its own expert."""
    file = open_gguf(TINY_MODEL)
    counts = [[5, 5, 9, 0, 7, 1, 1, 1] for _ in range(3)]
    heat = {"format": "moeserve-expert-heat", "version": 1, "model": "tiny", "layers": 3, "experts": 8}
    (tmp_path / "heat.json").write_text(json.dumps(heat | {"experts_per_token": 2, "counts": counts}))
    config = ServerConfig(model=str(TINY_MODEL), expert_heat=str(tmp_path / "heat.json"))
    layers = tuple(LayerPlacement("cuda", 8, gpu) for gpu in ((), (2, 4), tuple(range(8))))
    order = ram_expert_order(config, Placement("cuda", layers, "cuda", 0, 0))
    assert order == [[2, 4, 0, 1, 5, 6, 7, 3], [0, 1, 5, 6, 7, 3], []]
    in_ram = load_ram_experts(
        CpuStream(1), file, read_shape(file), order, torch.device(DEVICE), lambda *_: None
    )
    for index, (ids, layer) in enumerate(zip(order, in_ram.layers, strict=True)):
        if layer is None:
            assert not ids
            continue
        assert [layer.expert_map.tolist()[e] for e in ids] == list(range(len(ids)))
        tensor = file.tensors[name := n.of_layer(index, n.FFN_GATE_EXPS)]
        rows = torch.from_numpy(file.data(name).copy()).view(8, -1)[ids]
        expected = repack(rows, tensor.type, (len(ids), *tensor.shape[1:]))
        found = empty_planes(expected.type, (len(ids), *tensor.shape[1:]), "cpu")
        panels_to_planes(panel_bytes(layer.gate), found)
        assert torch.equal(found.codes, expected.codes)
