"""Computes a Placement from a model's sizes, the user's options and a GPU's memory. Pure: no torch, no CUDA, no
clock.

GPU memory is assigned in this order:

1. the engine's needs besides weights and KV (`Gpu.reserved_bytes`), the slots and drafts of recurrent state, and
   --unpacked-experts, at most what all layers' experts take as 16-bit floats;
2. the dense parts: embedding, head, and each layer's attention, norms and router. --n-gpu-layers N takes the last N
   layers. Without it, if the dense parts and some KV do not fit, first the embedding and then the first layers stay in
   RAM;
3. if RAM experts may be streamed to the GPU for long prompts, three buffers of one layer's RAM experts. If they would
   take more than half of the rest, nothing is streamed unless a rule asks for it;
4. the experts that rules or --num-gpu-experts assign to the GPU;
5. KV: what --max-total-tokens asks for, else a quarter of the rest, or more if experts leave more;
6. the other experts, hottest first, as many as fit, unless step 4 fixed the number;
7. by default, if all experts are on the GPU: unpacked experts, in memory that KV does not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.window_capacity import WindowPool
from moeserve.placement.dense import DensePlacement
from moeserve.placement.gpu import Gpu
from moeserve.placement.placement import Device, LayerPlacement, Placement, Prefill
from moeserve.placement.rules import Decision, Rules
from moeserve.placement.sizes import ModelSizes
from moeserve.placement.unpacked import layers_beside_kv, with_unpacked

# share for KV of the memory that the dense parts leave, as long as experts could use all of it
KV_SHARE = 0.25
MIN_KV_TOKENS = 64
# buffers of experts being copied to the GPU, in the CPU's format; a third buffer holds them as planes
COPIES = 2


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """The placement flags, and the wanted size of the KV pool."""

    num_gpu_experts: int | None = None  # per layer
    gpu_memory_budget: int | None = None  # bytes
    n_gpu_layers: int | None = None
    unpacked_experts: int | None = None  # bytes of GPU memory for experts as 16-bit floats
    kv_tokens_beside_unpacked: int | None = None  # automatic unpacked experts leave these to KV
    counts: Sequence[Sequence[int]] | None = None  # [layers][experts]: tokens routed to each
    rules: Rules | None = None
    max_total_tokens: int | None = None
    most_kv_tokens: int = 1 << 40  # a larger pool would never be used
    least_kv_tokens: int = MIN_KV_TOKENS
    state_slots: int = 0  # of recurrent state, for running sequences and snapshots
    ample_kv_tokens: int = MIN_KV_TOKENS  # if fewer fit, dense parts move to RAM where allowed
    # None: sliding-window layers share the pool, or some layers are in RAM
    window_pool: WindowPool | None = None

    def given_flags(self) -> list[str]:
        flags = {
            "--num-gpu-experts": self.num_gpu_experts,
            "--gpu-memory-budget": self.gpu_memory_budget,
            "--n-gpu-layers": self.n_gpu_layers,
            "--unpacked-experts": self.unpacked_experts,
            "--expert-heat": self.counts,
            "--placement-rules": self.rules,
        }
        return [flag for flag, value in flags.items() if value is not None]


def place(sizes: ModelSizes, options: PlacementOptions, gpu: Gpu | None) -> Placement:
    """Returns the placement; without a GPU everything is in RAM. Raises ConfigError for options that cannot be met;
    the message says what would fit."""
    if gpu is None:
        return _all_in_ram(sizes, options)
    _check_counts(sizes, options)
    return with_unpacked(_Planner(sizes, options, gpu).place(), sizes, options.unpacked_experts)


def _all_in_ram(sizes: ModelSizes, options: PlacementOptions) -> Placement:
    flags = options.given_flags()
    if flags:
        raise ConfigError(
            f"{', '.join(flags)}: there is nothing to place, the CPU engine has everything in RAM; leave it out, or "
            "choose a GPU"
        )
    everything = sizes.embedding.cpu + sizes.head.cpu + sizes.table_rows + sizes.cpu_layer_bytes
    layers = tuple(LayerPlacement("cpu", layer.num_experts) for layer in sizes.layers)
    return Placement("cpu", layers, "cpu", gpu_weight_bytes=0, cpu_weight_bytes=everything)


def _check_counts(sizes: ModelSizes, options: PlacementOptions) -> None:
    if options.num_gpu_experts is not None and options.num_gpu_experts > sizes.num_experts:
        raise ConfigError(
            f"--num-gpu-experts: {options.num_gpu_experts} is more than the {sizes.num_experts} experts of a layer; "
            "lower it"
        )
    if options.n_gpu_layers == 0:
        raise ConfigError("--n-gpu-layers 0 leaves nothing on the GPU; use --device cpu instead")
    if options.n_gpu_layers is not None and options.n_gpu_layers > len(sizes.layers):
        raise ConfigError(
            f"--n-gpu-layers: {options.n_gpu_layers} is more than the model's {len(sizes.layers)} layers; lower it"
        )


class _Planner:
    """Assigns the GPU's memory step by step; an instance is used once."""

    def __init__(self, sizes: ModelSizes, options: PlacementOptions, gpu: Gpu) -> None:
        self._sizes = sizes
        self._options = options
        self._budget = gpu.free_bytes if options.gpu_memory_budget is None else options.gpu_memory_budget
        self._check_budget(gpu)
        self._gpu = gpu
        self._num_layers = len(sizes.layers)
        self._dense = DensePlacement(sizes, options.n_gpu_layers, options.rules)
        # per layer: expert → device, for experts that rules placed
        self._pinned: list[dict[int, Device]] = []
        self._prefill: list[Prefill] = []
        self._streaming_rule: str | None = None
        self._apply_expert_rules()

    def place(self) -> Placement:
        chosen = [{e for e, where in pinned.items() if where == "cuda"} for pinned in self._pinned]
        kept = self._least_kv_bytes
        if self._move_dense_to_ram(chosen):  # only for the sake of KV, not for experts
            kept = self._ample_kv_bytes
        count = self._options.num_gpu_experts
        if count is not None:
            for layer, experts in enumerate(chosen):
                experts.update(self._most_used_of(layer, count))
        if self._room(chosen) < max(self._stream_bytes(chosen), kept):
            self._prefill = ["cpu" if way == "auto" else way for way in self._prefill]
        left = self._left(chosen)
        if count is None:
            share = int((left + self._stream_bytes(chosen)) * KV_SHARE)
            kv = min(self._most_kv_bytes, max(share, kept))
            self._fill(chosen, kv)
            left = self._left(chosen)
        most, beside = self._most_kv_bytes, self._options.kv_tokens_beside_unpacked
        placement = self._result(chosen, min(left, most))
        if beside is not None:
            kept = min(most, self._kv_bytes(max(self._least_kv_tokens, beside)))
            layers, taken = layers_beside_kv(placement, self._sizes, left, kept, most)
            placement = self._result(chosen, min(left - taken, most))
            placement = replace(placement, unpacked_layers=layers, unpacked_bytes=taken)
        return placement

    # ---------------------------------------------------------------- dense parts

    def _move_dense_to_ram(self, chosen: list[set[int]]) -> bool:
        """Moves dense parts to RAM until enough memory for KV is left. Returns True if any was moved. Layers whose
        experts a rule put on the GPU stay there. A requested number of GPU experts is kept, and is an error if it
        does not fit."""
        if self._options.num_gpu_experts:
            return False
        before = self._dense.bytes_on("cuda")
        held = {i for i, way in enumerate(self._prefill) if way == "cuda" or chosen[i]}
        while self._room_before_streaming(chosen) < self._ample_kv_bytes and self._dense.move_next(held):
            pass
        return self._dense.bytes_on("cuda") < before

    # ---------------------------------------------------------------- experts

    def _apply_expert_rules(self) -> None:
        for layer in range(self._num_layers):
            tensors = list(self._sizes.layers[layer].expert_tensors)
            pinned: dict[int, Device] = {}
            prefill: dict[Prefill, Decision | None] = {}
            for expert in range(self._sizes.layers[layer].num_experts):
                modules = (f"blk.{layer}.experts", f"blk.{layer}.experts.{expert}")
                decision = self._decide(f"expert {expert} of layer {layer}", tensors, modules)
                if decision is None:
                    prefill.setdefault("auto", None)
                    continue
                self._check_expert_rule(layer, decision)
                if decision.device is not None:
                    pinned[expert] = decision.device
                if decision.device != "cuda":
                    prefill.setdefault(decision.prefill or "auto", decision)
            if len(prefill) > 1:
                decision = next(d for d in reversed(prefill.values()) if d is not None)
                raise self._rule_error(
                    decision, f"is impossible: all RAM experts of layer {layer} must have the same `prefill`"
                )
            self._pinned.append(pinned)
            way: Prefill = next(iter(prefill), "auto")
            asking = prefill.get("cuda")
            if asking is not None and self._streaming_rule is None:
                self._streaming_rule = asking.rule
            self._prefill.append("cpu" if way == "auto" and not self._gpu.can_stream else way)
        if self._options.rules is not None:
            self._options.rules.check_all_applied()

    def _check_expert_rule(self, layer: int, decision: Decision) -> None:
        if decision.device == "cuda" and decision.prefill == "cpu":
            raise self._rule_error(
                decision,
                "is impossible: the GPU computes the experts that are in its memory; leave `prefill` out",
            )
        if decision.prefill == "cuda" and decision.device != "cuda" and not self._gpu.can_stream:
            raise self._rule_error(decision, "is impossible: the GPU engine does not stream experts yet")
        if "cuda" in (decision.device, decision.prefill) and self._dense.layers[layer] == "cpu":
            raise self._rule_error(
                decision,
                f"is impossible: the experts of layer {layer} follow its dense part, which is in RAM",
            )

    def _open_experts(self, layer: int) -> list[int]:
        """Returns the layer's experts that no rule has placed and that may go to the GPU."""
        if self._dense.layers[layer] == "cpu":
            return []
        return [e for e in range(self._sizes.layers[layer].num_experts) if e not in self._pinned[layer]]

    def _token_count(self, layer: int, expert: int) -> int:
        return 0 if self._options.counts is None else self._options.counts[layer][expert]

    def _most_used_of(self, layer: int, count: int) -> list[int]:
        """Returns the `count` most used experts of a layer; ties go to the lower id, so without heat the first
        `count`."""
        return sorted(self._open_experts(layer), key=lambda e: (-self._token_count(layer, e), e))[:count]

    def _fill(self, chosen: list[set[int]], kv: int) -> None:
        """Puts the hottest experts of all layers on the GPU, as many as leave `kv` bytes for KV. Ties go to the
        lower id, so that layers get equal numbers. One expert more can need less memory, because the streaming
        buffers shrink; therefore the search for the largest number goes from all experts downwards."""
        units = [(at, e) for at, got in enumerate(chosen) for e in self._open_experts(at) if e not in got]
        units.sort(key=lambda unit: (-self._token_count(*unit), unit[1], unit[0]))
        for layer, expert in units:
            chosen[layer].add(expert)
        room, stream = self._room(chosen), self._stream_bytes(chosen)
        while units and room < kv:
            layer, expert = units.pop()
            chosen[layer].discard(expert)
            grown = max(stream, self._stream_bytes_of(layer, chosen[layer]))
            room += self._sizes.layers[layer].expert.cuda - (grown - stream)
            stream = grown

    # ---------------------------------------------------------------- memory

    def _left(self, chosen: list[set[int]]) -> int:
        """Returns the bytes of the budget that are left for KV and further experts. Raises ConfigError if they do
        not suffice for the smallest KV pool."""
        left = self._room(chosen)
        if left < self._least_kv_bytes:
            raise ConfigError(self._too_little(chosen))
        return left

    def _room(self, chosen: list[set[int]]) -> int:
        return self._room_before_streaming(chosen) - self._stream_bytes(chosen)

    def _room_before_streaming(self, chosen: list[set[int]]) -> int:
        taken = self._engine_bytes + self._dense.bytes_on("cuda") + self._expert_bytes(chosen)
        return self._budget - taken - self._state_bytes - self._unpacked_bytes

    def _stream_bytes(self, chosen: list[set[int]]) -> int:
        """Returns the size of the streaming buffers: the RAM experts of the layer that has most."""
        return max(self._stream_bytes_of(layer, experts) for layer, experts in enumerate(chosen))

    def _stream_bytes_of(self, layer: int, experts: set[int]) -> int:
        if self._dense.layers[layer] == "cpu" or self._prefill[layer] == "cpu":
            return 0
        of_layer = self._sizes.layers[layer]
        in_ram, expert = of_layer.num_experts - len(experts), of_layer.expert
        return in_ram * (COPIES * expert.cpu + expert.cuda)

    def _expert_bytes(self, chosen: list[set[int]]) -> int:
        return sum(
            len(experts) * layer.expert.cuda
            for layer, experts in zip(self._sizes.layers, chosen, strict=True)
        )

    def _too_little(self, chosen: list[set[int]]) -> str:
        """Returns the error message with the memory that is needed and the settings that would fit."""
        parts = {
            "the engine itself": self._engine_bytes,
            f"{self._options.state_slots} slots of recurrent state": self._state_bytes,
            "dense weights": self._dense.bytes_on("cuda"),
            "experts": self._expert_bytes(chosen),
            "unpacked experts": self._unpacked_bytes,
            "buffers for streamed experts": self._stream_bytes(chosen),
            "the least KV": self._least_kv_bytes,
        }
        needed = ", ".join(
            f"{size / GIB:.2f} for {part}" for part, size in parts.items() if size >= GIB // 200
        )
        return (
            f"{self._budget / GIB:.2f} GiB of GPU memory do not suffice: {sum(parts.values()) / GIB:.2f} GiB are "
            f"needed ({needed}); {self._remedy(chosen)}"
        )

    def _remedy(self, chosen: list[set[int]]) -> str:
        per_expert = sum(
            layer.expert.cuda for layer, experts in zip(self._sizes.layers, chosen, strict=True) if experts
        )
        bare: list[set[int]] = [set() for _ in chosen]
        room = self._room(bare) - self._least_kv_bytes
        if self._options.num_gpu_experts and room >= 0:
            return f"--num-gpu-experts {room // per_expert} would fit"
        if room >= 0:
            return "move experts to the CPU with --placement-rules"
        layers = self._layers_that_fit()
        if layers:
            return f"--n-gpu-layers {layers} would fit, without experts"
        return "use the CPU engine, or a smaller model"

    def _layers_that_fit(self) -> int:
        """Returns how many layers' dense parts fit with their KV and the head, counted from the last layer."""
        tokens, slots, fitting = self._least_kv_tokens, self._options.state_slots, 0
        room = self._budget - self._gpu.reserved_bytes - self._sizes.head.cuda
        for count, layer in enumerate(reversed(self._sizes.layers[1:]), 1):
            room -= layer.dense.cuda + tokens * layer.kv + slots * layer.state + layer.records
            if room < 0:
                break
            fitting = fitting if layer.needs_layer_before else count
        return fitting  # all layers with the embedding did not fit

    @property
    def _unpacked_bytes(self) -> int:
        """Bytes that are kept for unpacked experts, before it is known which layers may have them."""
        return min(self._options.unpacked_experts or 0, sum(layer.unpacked for layer in self._sizes.layers))

    @property
    def _engine_bytes(self) -> int:
        return self._gpu.reserved_bytes + self._sizes.record_bytes(self._dense.in_ram)

    @property
    def _state_bytes(self) -> int:
        return self._options.state_slots * self._sizes.state_bytes(self._dense.in_ram)

    @property
    def _kv_bytes_per_token(self) -> int:
        """Returns the KV bytes per token of the layers on the GPU; at least 1, as all of them may be recurrent."""
        return max(1, self._sizes.kv_bytes(self._dense.in_ram))

    def _kv_bytes(self, tokens: int) -> int:
        """Returns the bytes of the KV pools for `tokens` tokens."""
        second = self._options.window_pool
        if second is None or self._dense.in_ram:
            return tokens * self._kv_bytes_per_token
        return second.num_bytes(tokens)

    @property
    def _ample_kv_bytes(self) -> int:
        wanted = min(self._options.most_kv_tokens, self._options.ample_kv_tokens)
        return self._kv_bytes(self._options.max_total_tokens or wanted)

    @property
    def _least_kv_tokens(self) -> int:
        return self._options.max_total_tokens or self._options.least_kv_tokens

    @property
    def _least_kv_bytes(self) -> int:
        return self._kv_bytes(self._least_kv_tokens)

    @property
    def _most_kv_bytes(self) -> int:
        return self._kv_bytes(self._options.max_total_tokens or self._options.most_kv_tokens)

    def _check_budget(self, gpu: Gpu) -> None:
        if self._budget > gpu.free_bytes:
            raise ConfigError(
                f"--gpu-memory-budget {self._budget / GIB:.2f}: only {gpu.free_bytes / GIB:.2f} GiB of GPU memory are "
                "free; lower it"
            )

    def _result(self, chosen: list[set[int]], kv_bytes: int) -> Placement:
        layers = tuple(
            LayerPlacement(dense, of.num_experts, tuple(sorted(experts)), prefill, frozenset(pinned))
            for dense, of, experts, prefill, pinned in zip(
                self._dense.layers, self._sizes.layers, chosen, self._prefill, self._pinned, strict=True
            )
        )
        in_ram = self._dense.bytes_on("cpu") + self._sizes.table_rows
        in_ram += sum(
            (layer.num_experts - len(experts)) * layer.expert.cpu
            for layer, experts in zip(self._sizes.layers, chosen, strict=True)
        )
        return Placement(
            embedding=self._dense.embedding,
            layers=layers,
            head="cuda",
            gpu_weight_bytes=self._dense.bytes_on("cuda") + self._expert_bytes(chosen),
            cpu_weight_bytes=in_ram,
            stream_bytes=self._stream_bytes(chosen),
            kv_bytes=kv_bytes,
            kv_tokens=kv_bytes // self._kv_bytes_per_token,
            state_slots=self._options.state_slots,
            streaming_rule=self._streaming_rule,
        )

    # ---------------------------------------------------------------- rules

    def _decide(self, what: str, tensors: list[str], modules: tuple[str, ...]) -> Decision | None:
        return None if self._options.rules is None else self._options.rules.decide(what, tensors, modules)

    def _rule_error(self, decision: Decision, problem: str) -> ConfigError:
        assert self._options.rules is not None
        return self._options.rules.error(decision, problem)
