"""Placement: where every part of a model lies and computes. A frozen value; `place.py` makes it.

Experts in RAM are computed where they lie, by the CPU pool. In steps with many prompt tokens the weights of some or all
may instead be streamed to the GPU, layer by layer; a layer's `prefill` says whether.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moeserve.placement.sizes import ModelSizes

Device = Literal["cpu", "cuda"]
# Where the experts in RAM compute in a step with prompt tokens. "auto": on the GPU from --gpu-prefill-token-threshold
# tokens on, or a part that grows with the tokens; "cuda": on the GPU, whatever their number; "cpu": never there.
Prefill = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    dense: Device  # attention, norms, router, what every token passes, and the layer's KV
    num_experts: int
    gpu_experts: tuple[int, ...] = ()  # ids, ascending; in GPU memory. The others are in RAM only
    prefill: Prefill = "auto"
    fixed: frozenset[int] = frozenset()  # ids that rules have placed
    # The experts in GPU memory that no rule has placed are copies, which the expert cache may exchange: all that it may
    # move lie in RAM too.
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
        """There are slots in GPU memory, and experts to exchange."""
        return self.num_cpu_experts > 0 and not self.fixed.issuperset(self.gpu_experts)

    @property
    def copied_experts(self) -> tuple[int, ...]:
        """The ids of those in GPU memory that lie in RAM too, ascending."""
        return tuple(e for e in self.gpu_experts if e not in self.fixed) if self.is_cached else ()


@dataclass(frozen=True, slots=True)
class Placement:
    """Which device has what. On a machine without a GPU everything is on "cpu"."""

    embedding: Device
    layers: tuple[LayerPlacement, ...]
    head: Device
    gpu_weight_bytes: int  # as planes
    cpu_weight_bytes: int
    stream_bytes: int = 0  # of GPU memory: the buffers through which RAM experts are streamed
    kv_bytes: int | None = None  # of the GPU's memory; None: no layer's KV is there
    kv_tokens: int | None = None  # that these hold in one pool for all layers
    state_slots: int = 0  # of recurrent state, for which there is room where the layers are
    # The first that asks for prefill "cuda", as it is quoted: it must be kept.
    streaming_rule: str | None = None

    @property
    def num_experts(self) -> int:
        """The experts of a layer that has any."""
        return max(layer.num_experts for layer in self.layers)

    @property
    def uses_gpu(self) -> bool:
        return any(layer.dense == "cuda" for layer in self.layers)

    @property
    def layers_in_ram(self) -> int:
        """How many: the first ones. The others' dense parts are on the GPU."""
        return sum(layer.dense == "cpu" for layer in self.layers)

    @property
    def gpu_layers(self) -> tuple[LayerPlacement, ...]:
        return self.layers[self.layers_in_ram :]

    @property
    def begins_in_ram(self) -> bool:
        """A step's first part, the embedding at least, is the CPU's."""
        return self.embedding == "cpu"

    @property
    def shares_layers(self) -> bool:
        """Layers on the GPU have experts in RAM."""
        return any(layer.num_cpu_experts for layer in self.gpu_layers)

    @property
    def has_cache(self) -> bool:
        return any(layer.is_cached for layer in self.layers)

    def with_cache(self, sizes: ModelSizes) -> Placement:
        """The same with copies in RAM of the experts in GPU memory, where others may take their places."""
        layers = tuple(replace(layer, is_cached=layer.can_be_cached) for layer in self.layers)
        copies = sum(
            len(layer.copied_experts) * of.expert.cpu for layer, of in zip(layers, sizes.layers, strict=True)
        )
        return replace(self, layers=layers, cpu_weight_bytes=self.cpu_weight_bytes + copies)

    def cpu_experts(self, layer: int) -> tuple[int, ...]:
        """The ids of a layer's experts in RAM, ascending."""
        own = self.layers[layer]
        gone = set(own.gpu_experts).difference(own.copied_experts)
        return tuple(e for e in range(self.layers[layer].num_experts) if e not in gone)

    @property
    def num_gpu_experts(self) -> int:
        """In all layers together."""
        return sum(len(layer.gpu_experts) for layer in self.layers)
