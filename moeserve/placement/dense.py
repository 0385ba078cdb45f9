"""Places the dense parts of a model: embedding, head, and the attention, norms, router and shared expert of each
layer.

A step runs on the CPU first and then on the GPU. So the parts in RAM are a prefix of the model: nothing, the
embedding, or the embedding and the first layers. The head is on the GPU.
"""

from __future__ import annotations

from collections.abc import Container

from moeserve.errors import ConfigError
from moeserve.models.sources.gguf import names as n
from moeserve.placement.placement import Device
from moeserve.placement.rules import Decision, Rules
from moeserve.placement.sizes import ModelSizes


class DensePlacement:
    """The placement of the dense parts by rules and --n-gpu-layers. Without that flag, parts that no rule assigns to
    the GPU can be moved to RAM later."""

    def __init__(self, sizes: ModelSizes, n_gpu_layers: int | None, rules: Rules | None) -> None:
        """Raises ConfigError, which quotes the rule, if a step would have to go from the CPU to the GPU more than
        once."""
        self._sizes = sizes
        self._rules = rules
        self._may_move = n_gpu_layers is None
        count = len(sizes.layers)
        first = 0 if n_gpu_layers is None else count - n_gpu_layers
        self._decisions = [self._decide_layer(index) for index in range(count)]
        self.layers: list[Device] = [
            self._place(f"the dense part of layer {index}", decision, "cuda" if index >= first else "cpu")
            for index, decision in enumerate(self._decisions)
        ]
        self._check_layers()
        self._check_first()
        self._of_embedding = self._decide("the embedding", [n.TOKEN_EMBD], "token_embd")
        self.embedding = self._place("the embedding", self._of_embedding, self.layers[0])
        self._check_ends()

    @property
    def in_ram(self) -> int:
        """Number of layers in RAM; they are the first ones."""
        return self.layers.count("cpu")

    def bytes_on(self, device: Device) -> int:
        parts = [(self._sizes.embedding, self.embedding), (self._sizes.head, "cuda")]
        parts += [(layer.dense, where) for layer, where in zip(self._sizes.layers, self.layers, strict=True)]
        if self.embedding == "cpu" and self._sizes.block_embedding is not None:
            parts.append((self._sizes.block_embedding, "cuda"))
        return sum(size.on(device) for size, where in parts if where == device)

    def move_next(self, held: Container[int]) -> bool:
        """Moves the next part of the model from the GPU to RAM: first the embedding (not slower in RAM), then one
        layer after another, each together with the layers that use its keys. Where a block that drafts reads the
        embedding on the GPU, it moves together with the first layer. held: layers that must stay on the GPU. Returns
        False, and moves nothing, if a flag, a rule or `held` forbids the move, or if no layer would be left on the
        GPU."""
        if not self._may_move:
            return False
        if self.embedding == "cuda":
            if _is_held(self._of_embedding) or self._sizes.layers[0].needs_layer_before:
                return False
            if self._sizes.block_embedding is None:
                self.embedding = "cpu"
                return True
        first = self.in_ram
        end = self._next_start(first + 1)
        if end is None or any(at in held or _is_held(self._decisions[at]) for at in range(first, end)):
            return False
        self.embedding = "cpu"
        self.layers[first:end] = ["cpu"] * (end - first)
        return True

    def _next_start(self, layer: int) -> int | None:
        """Returns the first layer from `layer` on that can be the GPU's first; None: there is none."""
        layers = self._sizes.layers
        return next((at for at in range(layer, len(layers)) if not layers[at].needs_layer_before), None)

    def _check_first(self) -> None:
        first = self.in_ram
        if first == 0 or not self._sizes.layers[first].needs_layer_before:
            return
        starts = (at for at in reversed(range(first)) if not self._sizes.layers[at].needs_layer_before)
        if (start := next(starts, None)) is None:
            raise ConfigError(
                f"layer {first} reads an input that is computed with the embedding, on the same device. So either all "
                f"layers must be on the GPU or all in RAM: use --n-gpu-layers {len(self.layers)}, or --device cpu"
            )
        raise ConfigError(
            f"layer {first} uses keys of layer {start}, or its choice of keys, so both layers must be on the GPU or "
            f"both in RAM: use --n-gpu-layers {len(self.layers) - start}"
        )

    def _decide_layer(self, index: int) -> Decision | None:
        tensors = list(self._sizes.layers[index].dense_tensors)
        return self._decide(f"the dense part of layer {index}", tensors, f"blk.{index}.dense")

    def _decide(self, what: str, tensors: list[str], module: str) -> Decision | None:
        return None if self._rules is None else self._rules.decide(what, tensors, (module,))

    def _place(self, what: str, decision: Decision | None, default: Device) -> Device:
        if decision is None:
            return default
        device = decision.device or default
        if decision.prefill is not None and decision.prefill != device:
            raise self._error(
                decision,
                f"is impossible: {what} is computed where its weights are ({device}), in prefill and in decode; leave "
                "`prefill` out",
            )
        return device

    def _check_layers(self) -> None:
        if "cuda" not in self.layers:
            raise ConfigError("--placement-rules leaves no layer on the GPU; say --device cpu for that")
        first = self.layers.index("cuda")
        behind = next((i for i in range(first, len(self.layers)) if self.layers[i] == "cpu"), None)
        if behind is not None:
            # The flag alone cannot cause this: either a rule put this layer into RAM, or a rule put the other on the
            # GPU.
            decision = self._decisions[behind if _is_by_rule(self._decisions[behind]) else first]
            raise self._error(
                decision,
                f"is impossible: layer {behind} would be in RAM after layer {first} on the GPU, but only the "
                "first layers of the model can be in RAM; move both to the same place",
            )

    def _check_ends(self) -> None:
        if self.embedding == "cuda" and self.layers[0] == "cpu":
            raise self._error(
                self._of_embedding,
                "is impossible: layer 0 is in RAM, so the embedding, which comes before it, must "
                "be in RAM too; move the embedding to RAM, or layer 0 to the GPU",
            )
        needed = self._sizes.layers[0].needs_layer_before and self.layers[0] == "cuda"
        if needed and self.embedding == "cpu":
            raise self._error(
                self._of_embedding,
                "is impossible: the layers on the GPU read inputs that are computed with the embedding, so it must be "
                "on the GPU too; move the embedding to the GPU, or layer 0 to RAM",
            )
        of_head = self._decide("the head", [n.OUTPUT, n.OUTPUT_NORM], "output")
        if self._place("the head", of_head, "cuda") == "cpu":
            raise self._error(
                of_head,
                "is impossible: the head follows the last layers, so it is always on the GPU; leave it out "
                "of the rule",
            )

    def _error(self, decision: Decision | None, problem: str) -> ConfigError:
        assert self._rules is not None
        assert decision is not None
        return self._rules.error(decision, problem)


def _is_by_rule(decision: Decision | None) -> bool:
    return decision is not None and decision.device is not None


def _is_held(decision: Decision | None) -> bool:
    return decision is not None and "cuda" in (decision.device, decision.prefill)
