"""Models and GPUs for tests of the placement: sizes out of thin air, rules and heat as files."""

from __future__ import annotations

from pathlib import Path

from moeserve.config.units import MIB
from moeserve.models.tensors import dense_tensors, expert_tensors
from moeserve.placement import Gpu, ModelSizes, Placement
from moeserve.placement.rules import Rules
from moeserve.placement.sizes import Bytes, LayerSizes
from tests.support.models.model_header import qwen3moe

SHAPE = qwen3moe(num_layers=64)  # for the names of tensors


def model(
    layers: int = 4, experts: int = 8, expert_mib: int = 2, dense_mib: int = 10, without_experts: int = 0
) -> ModelSizes:
    """On a GPU everything is a little larger, as planes are; every other layer's experts are larger still. The first
    layers may have none."""

    def layer(index: int) -> LayerSizes:
        expert = (expert_mib + index % 2) * MIB
        dense = Bytes(dense_mib * MIB, dense_mib * MIB + MIB)
        if index < without_experts:
            return LayerSizes(dense, 0, Bytes(0, 0), kv=1024)
        return LayerSizes(
            dense,
            experts,
            Bytes(expert, expert + MIB // 8),
            kv=1024,
            dense_tensors=tuple(dense_tensors(SHAPE, index)),
            expert_tensors=expert_tensors(SHAPE, index),
        )

    return ModelSizes(
        embedding=Bytes(8 * MIB, 9 * MIB),
        head=Bytes(8 * MIB, 9 * MIB),
        layers=tuple(layer(index) for index in range(layers)),
    )


def gpu(mib: int, reserved_mib: int = 16) -> Gpu:
    return Gpu(mib * MIB, reserved_mib * MIB)


def gpu_bytes(sizes: ModelSizes, placement: Placement, reserved: int) -> int:
    """What the placement takes of a GPU, counted by hand."""
    total = reserved
    total += sizes.embedding.cuda if placement.embedding == "cuda" else 0
    total += sizes.head.cuda if placement.head == "cuda" else 0
    kv = 0
    buffers = 0
    for size, layer in zip(sizes.layers, placement.layers, strict=True):
        if layer.dense == "cuda":
            total += size.dense.cuda
            kv += size.kv
            if layer.prefill != "cpu":
                in_ram = size.num_experts - len(layer.gpu_experts)
                buffers = max(buffers, in_ram * (2 * size.expert.cpu + size.expert.cuda))
        total += len(layer.gpu_experts) * size.expert.cuda
    return total + buffers + (placement.kv_tokens or 0) * kv


def rules(tmp_path: Path, text: str) -> Rules:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    return Rules.read(path)
