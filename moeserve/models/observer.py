"""The tensors of a model's inside, for an observer: one call a layer, with the same tensors from every engine."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class LayerRouting(NamedTuple):
    """The routing of the rows of a layer with experts."""

    router_logits: Tensor  # [n, experts]
    expert_ids: Tensor  # int32 [n, top_k]
    expert_weights: Tensor  # [n, top_k], as the router gives them


class LayerObserver(Protocol):
    """Given to a model's `forward`. A call's tensors are finished, and change after it: copy what is to be kept.

    They may have more rows than the step, and lie on the device. n: the rows of the step.
    """

    def embedding(self, x: Tensor) -> None:
        """x: float32 [n, hidden]."""
        ...

    def layer(
        self,
        index: int,
        *,
        after_attention: Tensor,
        expert_input: Tensor,
        routing: LayerRouting | None,
        expert_output: Tensor,
    ) -> None:
        """after_attention: [n, hidden], the residual stream with the attention block's output in it. expert_input:
        [n, hidden], its norm, which router and experts read, before it is rounded for them where it is. routing: None
        for a layer without experts, whose feed-forward takes their place. expert_output: [n, hidden], what the experts
        add to the residual stream. Floats of any width."""
        ...
