"""Reads the head layouts of recurrent layers, and which tensors of them a file must have."""

from __future__ import annotations

from moeserve.kernels.delta_net.heads import DeltaHeads
from moeserve.kernels.mamba2.heads import Mamba2Heads
from moeserve.kernels.short_conv.heads import ShortConvHeads
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.short_conv import ShortConvShape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def delta_heads(reader: ShapeReader, *, is_tiled: bool) -> DeltaHeads:
    """Returns the heads of gated DeltaNets, read from the metadata. is_tiled: the order of value heads in the file: the
    first ones of all key heads, then the second ones. Raises ModelError for a missing or unsupported setting."""
    key_heads, value_heads = _groups_and_heads(reader)
    return DeltaHeads(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=reader.integer("ssm.state_size", 1, 1024),
        value_dim=_value_dim(reader, value_heads),
        conv_kernel=reader.integer("ssm.conv_kernel", 2, 16),
        is_tiled=is_tiled,
    )


def kimi_delta_heads(reader: ShapeReader, num_heads: int) -> DeltaHeads:
    """Returns the heads of Kimi Delta Attention, read from the metadata; q, k and v all have `num_heads`. Raises
    ModelError for a missing or unsupported setting."""
    dim = reader.integer("kda.head_dim", 1, 1024)
    taps = reader.integer("ssm.conv_kernel", 2, 16)
    bound = reader.number("kda.gate_lower_bound", -1e3, 0.0, default=0.0)
    return DeltaHeads(num_heads, num_heads, dim, dim, taps, is_kimi=True, decay_bound=bound)


def mamba2_shape(reader: ShapeReader, source: ModelSource, *, eps: float | None = None) -> Mamba2Shape:
    """Reads the shape that all Mamba-2 layers have. eps: epsilon of their norms; None: the model's. Raises
    ModelError."""
    norms = (tensor for name, tensor in source.tensors.items() if name.endswith(n.of_part(n.SSM_NORM)))
    norm_by_group = any(len(norm.shape) > 1 for norm in norms)
    num_groups, num_heads = _groups_and_heads(reader)
    heads = Mamba2Heads(
        num_heads=num_heads,
        num_groups=num_groups,
        head_dim=_value_dim(reader, num_heads),
        state_dim=reader.integer("ssm.state_size", 1, 1024),
        conv_kernel=reader.integer("ssm.conv_kernel", 2, 16),
    )
    return Mamba2Shape(heads, norm_by_group, reader.rms_eps() if eps is None else eps)


def short_conv_shape(reader: ShapeReader) -> ShortConvShape:
    """Returns the shape that all of LFM2's convolutions have, read from the metadata. Raises ModelError for a missing
    or unsupported setting."""
    return ShortConvShape(ShortConvHeads(reader.hidden_size, reader.integer("shortconv.l_cache", 2, 16)))


def _groups_and_heads(reader: ShapeReader) -> tuple[int, int]:
    groups = reader.integer("ssm.group_count", 1, 1024)
    heads = reader.integer("ssm.time_step_rank", groups, 1024)
    if heads % groups:
        raise reader.error("ssm.group_count", f"is {groups}; it must divide the {heads} value heads")
    return groups, heads


def _value_dim(reader: ShapeReader, value_heads: int) -> int:
    if reader.has(n.SSM_VALUE_DIM):
        return reader.integer(n.SSM_VALUE_DIM, 1, 1024)
    inner = reader.integer("ssm.inner_size", 1, 1 << 20)
    if inner % value_heads:
        raise reader.error("ssm.inner_size", f"is {inner}; the {value_heads} value heads must divide it")
    return inner // value_heads
