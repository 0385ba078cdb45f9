"""The decode rows' own tokens, which attention stores in the pool itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.kernels.rope.op import SectionPositions, rotary_dim


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The keys and values of a step's rows before their norm and rotation, with the parameters of `rope_store`
    (rope/op.py), for a decode kernel that stores them in the KV pool itself. Shapes and dtypes are beside the fields.
    """

    k: Tensor  # [n, kv_heads * dim], rows at any stride, as v and as q
    v: Tensor  # [n, kv_heads * v_dim]
    q_norm: Tensor | None  # float32 [dim], None: no norm
    k_norm: Tensor | None
    eps: float
    cos: Tensor  # float32 [positions, rotary_dim / 2]
    sin: Tensor
    slots: Tensor  # int32 [n], below 0: not stored
    v_eps: float | None = None
    norm_after: bool = False
    v_scale: float = 1.0
    sections: SectionPositions | None = None


@dataclass(frozen=True, slots=True)
class KernelArguments:
    """The same as `NewTokens`, in the form that a decode kernel takes: tensors, and int and float constants. The
    defaults are for rows whose tokens are in the KV pool already."""

    rotary: int  # columns that rotate
    k: Tensor | None = None
    v: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    sections: Tensor | None = None  # positions by section
    slots: Tensor | None = None
    k_stride: int = 0
    v_stride: int = 0
    q_eps: float | None = None  # None: no norm, as for keys and values
    k_eps: float | None = None
    v_eps: float | None = None
    v_scale: float = 1.0
    norm_after: bool = False
    height: int = 0
    width: int = 0
    time: int = 0


def kernel_arguments(new: NewTokens | None, dim: int) -> KernelArguments:
    """Returns the arguments for heads of `dim` columns; None: rows whose tokens the pool has already."""
    if new is None:
        return KernelArguments(dim)
    sections = new.sections
    return KernelArguments(
        rotary_dim(new.cos, dim),
        new.k,
        new.v,
        new.q_norm,
        new.k_norm,
        new.cos,
        new.sin,
        None if sections is None else sections.positions,
        new.slots,
        new.k.stride(0),
        new.v.stride(0),
        None if new.q_norm is None else new.eps,
        None if new.k_norm is None else new.eps,
        new.v_eps,
        new.v_scale,
        new.norm_after,
        *((0, 0, 0) if sections is None else (sections.height, sections.width, sections.time)),
    )
