"""Placement: where each part of a model is stored and computed. An immutable value, made by `place.py`.

The CPU pool computes the experts in RAM. In steps with many prompt tokens, some or all of these experts may instead be
streamed to the GPU, layer by layer, and computed there; a layer's field `prefill` says which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moeserve.placement.sizes import ModelSizes

Device = Literal["cpu", "cuda"]
# Where RAM experts are computed in a step with prompt tokens. "auto": on the GPU from --gpu-prefill-token-threshold
# tokens on, or a fraction of them that grows with the tokens; "cuda": always on the GPU; "cpu": never on the GPU.
Prefill = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    dense: Device  # attention, norms, router, shared experts, and the layer's KV
    num_experts: int
    gpu_experts: tuple[int, ...] = ()  # ids in GPU memory, ascending; the others are only in RAM
    prefill: Prefill = "auto"
    fixed: frozenset[int] = frozenset()  # ids that rules have placed
    # If true, the GPU experts that no rule placed are copies that the expert cache may exchange; every expert that it
    # may move is also in RAM.
    is_cached: bool = False

    def __post_init__(self) -> None:
        assert list(self.gpu_experts) == sorted(set(self.gpu_experts))
        assert self.dense == "cuda" or (not self.gpu_experts and self.prefill != "cuda")

    @property
    def num_cpu_experts(self) -> int:
        """The layer's experts that are not in GPU memory."""
        return self.num_experts - len(self.gpu_experts)

    @property
    def can_be_cached(self) -> bool:
        """True if the layer has experts on the GPU that may be exchanged, and others to exchange them for."""
        return self.num_cpu_experts > 0 and not self.fixed.issuperset(self.gpu_experts)

    @property
    def copied_experts(self) -> tuple[int, ...]:
        """Ids of the experts in GPU memory that are also in RAM, ascending."""
        return tuple(e for e in self.gpu_experts if e not in self.fixed) if self.is_cached else ()


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of each part. Without a GPU everything is on "cpu"."""

    embedding: Device
    layers: tuple[LayerPlacement, ...]
    head: Device
    gpu_weight_bytes: int  # in the planes format
    cpu_weight_bytes: int
    stream_bytes: int = 0  # GPU memory of the buffers through which RAM experts are streamed
    kv_bytes: int | None = None  # of GPU memory; None: all layers' KV is in RAM
    kv_tokens: int | None = None  # tokens that fit in `kv_bytes` with one pool for all layers
    state_slots: int = 0  # recurrent-state slots that fit in the memory of the recurrent layers
    # The first rule that asks for prefill "cuda", quoted: such a rule must be obeyed, not dropped for lack of memory.
    streaming_rule: str | None = None
    # For each layer, how many of its RAM experts RAM holds at a time, beside a GPU; the others are read from disk when
    # they are used. None: RAM holds all.
    ram_slots: tuple[int, ...] | None = None
    unpacked_layers: tuple[int, ...] = ()  # whose experts the GPU holds a second time, as 16-bit floats
    unpacked_bytes: int = 0  # GPU memory of these

    @property
    def num_experts(self) -> int:
        """Experts per layer, in layers that have experts."""
        return max(layer.num_experts for layer in self.layers)

    @property
    def uses_gpu(self) -> bool:
        return any(layer.dense == "cuda" for layer in self.layers)

    @property
    def layers_in_ram(self) -> int:
        """Number of layers whose dense part is in RAM; they are the first ones."""
        return sum(layer.dense == "cpu" for layer in self.layers)

    @property
    def gpu_layers(self) -> tuple[LayerPlacement, ...]:
        return self.layers[self.layers_in_ram :]

    @property
    def begins_in_ram(self) -> bool:
        """True if the CPU computes the first part of a step, at least the embedding."""
        return self.embedding == "cpu"

    @property
    def shares_layers(self) -> bool:
        """True if layers on the GPU have experts in RAM."""
        return any(layer.num_cpu_experts for layer in self.gpu_layers)

    @property
    def has_cache(self) -> bool:
        return any(layer.is_cached for layer in self.layers)

    def with_cache(self, sizes: ModelSizes) -> Placement:
        """Returns this placement with an expert cache: RAM copies of the GPU experts in layers where experts may be
        exchanged."""
        layers = tuple(replace(layer, is_cached=layer.can_be_cached) for layer in self.layers)
        copies = sum(
            len(layer.copied_experts) * of.expert.cpu for layer, of in zip(layers, sizes.layers, strict=True)
        )
        return replace(self, layers=layers, cpu_weight_bytes=self.cpu_weight_bytes + copies)

    def cpu_experts(self, layer: int) -> tuple[int, ...]:
        """Returns the ids of a layer's experts in RAM, ascending."""
        own = self.layers[layer]
        gone = set(own.gpu_experts).difference(own.copied_experts)
        return tuple(e for e in range(self.layers[layer].num_experts) if e not in gone)

    @property
    def num_gpu_experts(self) -> int:
        """GPU experts of all layers together."""
        return sum(len(layer.gpu_experts) for layer in self.layers)
