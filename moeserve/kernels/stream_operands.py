"""The operands of `CpuStream` operations other than tensors: workspaces, cache layers, head layouts. GPUs use the
same cache layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moeserve.kernels import _C


class Activations:
    """A workspace for up to `tokens` rows of `cols` activations, as float32 and as int8 with a scale per 32 columns.

    A form that no weight reads may be omitted. within: use the memory of another, wider workspace. `f32`: float32
    [tokens, cols]; `q8`: uint8 [tokens, 1.5 * cols], in the layout of kernels.h.
    """

    def __init__(
        self, tokens: int, cols: int, *, f32: bool = True, q8: bool = True, within: Activations | None = None
    ) -> None:
        shapes = (tokens if f32 else 0, cols), (tokens if q8 else 0, _C.quantized_row_bytes(cols))
        if within is None:
            self.f32, self.q8 = torch.empty(shapes[0]), torch.empty(shapes[1], dtype=torch.uint8)
        else:
            self.f32, self.q8 = (
                memory.view(-1)[: shape[0] * shape[1]].view(shape)
                for memory, shape in zip((within.f32, within.q8), shapes, strict=True)
            )
        self.native = _C.Activations(self.f32 if f32 else None, self.q8 if q8 else None, cols)

    @classmethod
    def over(cls, f32: torch.Tensor) -> Activations:
        """Returns activations in this memory, float32 [tokens, cols], without the int8 form."""
        made = cls.__new__(cls)
        made.f32, made.q8 = f32, torch.empty(0, _C.quantized_row_bytes(f32.shape[1]), dtype=torch.uint8)
        made.native = _C.Activations(f32, None, f32.shape[1])
        return made


@dataclass(frozen=True, slots=True)
class ThreadPlacement:
    """The cores on which a pool thread runs. The threads of a node are consecutive in the list; nodes count from 0."""

    node: int = 0  # NUMA node
    cpus: tuple[int, ...] = ()  # CPUs that the thread is bound to; empty: not bound


@dataclass(frozen=True, slots=True)
class KeyRings:
    """The place of the keys of compressed attention's windows among a layer's keys: a ring of rows for each state slot,
    in which position p has row p % rows. They follow the rows of KV slots, and are followed by rows for a step's
    keys."""

    first: int  # row of state slot 0's ring
    rows: int  # of a ring
    num: int  # state slots

    @property
    def end(self) -> int:
        """The first row after the rings."""
        return self.first + self.num * self.rows


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer of the KV pool: [slots, kv_heads, head_dim] each (values may be narrower). float16, on a GPU also
    bfloat16; or int8 with a float16 scale per 32 numbers of a head; on a GPU also float8_e4m3fn with a scale per
    head (kernels/quantize/kv.py). For latent attention, keys are float16 [slots, 1, latent and rotary dimensions],
    and values are a view of them."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None  # int8 keys: [slots, kv_heads, head_dim / 32]; float8: [.., 1]
    value_scales: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None  # float16 [slots, 1, width], by which keys are chosen
    # Compressed attention: rows of `keys` after the rows of KV slots.
    rings: KeyRings | None = field(default=None, kw_only=True)
    # Tokens of a block. Above 1 only the slot of a block's last token has rows; a slot's number says which it is.
    block: int = field(default=1, kw_only=True)

    @property
    def num_slots(self) -> int:
        """Rows of KV slots."""
        return len(self.keys) if self.rings is None else self.rings.first

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Returns the layer's KV tensors (keys, their scales, values, their scales, index keys; whichever exist),
        without the scratch rows after the KV slots. The values of latent attention are left out, because they are a
        view of the keys."""
        is_view = self.keys.numel() > 0 and self.values.data_ptr() == self.keys.data_ptr()
        values = None if is_view else self.values
        keys = self.keys[: self.num_slots]
        every = (keys, self.key_scales, values, self.value_scales, self.index_keys)
        return [tensor for tensor in every if tensor is not None]

    @property
    def of_states(self) -> torch.Tensor | None:
        """Returns float32 [state slots, any]: the bytes of each state slot's ring; None without rings."""
        if self.rings is None:
            return None
        rings = self.keys[self.rings.first : self.rings.end]
        return rings.view(self.rings.num, -1).view(torch.float32)


@dataclass(frozen=True, slots=True)
class DiskLayer:
    """A layer whose experts are on disk and are read into slots in RAM when a token is routed to them. See
    `disk_experts.py`."""

    native: _C.DiskExperts
    layer: int
    num_experts: int
    # int32 [tokens, any]: experts that `ahead_layer` will probably use, read ahead; None: no guess
    ahead: torch.Tensor | None = None
    ahead_layer: int = 0


@dataclass(frozen=True, slots=True)
class StateLayer:
    """One layer's part of the recurrent states: float32 [slots, values], from column `first` on."""

    states: torch.Tensor
    first: int


@dataclass(frozen=True, slots=True)
class StateDrafts:
    """The last drafts[i] rows of sequence i are drafts and do not change the state; their effect is recorded in the
    layer's `pending`, from record first[i] on. int32 [sequences] each."""

    drafts: torch.Tensor
    first: torch.Tensor


@dataclass(frozen=True, slots=True)
class StateSequences:
    """The sequences whose states a step's rows advance: sequence i has rows row[i] .. row[i] + count[i] - 1 and its
    state in slot[i]; sequences are consecutive. int32 [sequences] each."""

    row: torch.Tensor
    count: torch.Tensor
    slot: torch.Tensor
    drafts: StateDrafts | None = None


@dataclass(frozen=True, slots=True)
class DeltaParameters:
    """The parameters of one recurrent layer besides its matrices; float32."""

    conv: torch.Tensor  # [conv_kernel, channels], the weight of the oldest token first
    rate: torch.Tensor  # [value_heads]: -exp(A_log)
    dt_bias: torch.Tensor  # [decays]
    norm: torch.Tensor  # [value_dim]


@dataclass(frozen=True, slots=True)
class Mamba2Parameters:
    """The parameters of one Mamba-2 layer besides its matrices; float32. Channels: on the CPU in the order C, B, x; on
    a GPU x, B, C."""

    conv: torch.Tensor  # [conv_kernel, channels], the weight of the oldest token first
    conv_bias: torch.Tensor  # [channels]
    rate: torch.Tensor  # [num_heads]: -exp(A_log)
    dt_bias: torch.Tensor  # [num_heads]
    skip: torch.Tensor  # [num_heads]: D
    norm: torch.Tensor | None  # [value_width]; None: not normalised


@dataclass(frozen=True, slots=True)
class Heads:
    num: int
    num_kv: int  # divides num
    dim: int  # a multiple of 32
    value_dim: int | None = None  # width of values, a multiple of 32 and at most dim; None: dim
    # Latent attention: all heads read one vector of `dim` numbers, whose first value_dim are the value; num_kv is the
    # number of parts into which the heads are divided for threads.
    is_latent: bool = False

    @property
    def value_width(self) -> int:
        """Width of a head's value."""
        return self.dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The LoRA adapter of each row of a step, by number of the adapter's slot."""

    adapters: torch.Tensor  # int32 [n]; -1: none
    sorted: torch.Tensor  # int32 [any]: rows with adapters, sorted by adapter


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """The LoRA matrices for the three products of a mixture of experts; None where no adapter changes the product."""

    gate: _C.LoraTable | None
    up: _C.LoraTable | None
    down: _C.LoraTable | None
    adapters: torch.Tensor  # int32 [n]: adapter of each row, -1: none
    shrunk: torch.Tensor  # float32 workspace for 2 * n * top_k rows of the largest rank


class RoutingWorkspace:
    """The routes of one MoE layer for up to `tokens` tokens, and buffers for sorting them; layers reuse it."""

    def __init__(self, tokens: int, experts: int, top_k: int) -> None:
        self.ids = torch.empty(tokens, top_k, dtype=torch.int32)
        self.weights = torch.empty(tokens, top_k)
        # A late thread may read any of these, so each must be a valid index from the start.
        self.starts = torch.zeros(experts + 1, dtype=torch.int32)
        self.active = torch.zeros(experts + 1, dtype=torch.int32)
        self.routes = torch.zeros(tokens * top_k, dtype=torch.int32)
