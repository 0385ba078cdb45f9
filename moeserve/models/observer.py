"""The interface through which an observer sees a model's intermediate tensors: one call per layer, equal for all
engines."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class LayerRouting(NamedTuple):
    """The routing of rows in a layer with experts."""

    router_logits: Tensor  # [n, experts]
    expert_ids: Tensor  # int32 [n, top_k]
    expert_weights: Tensor  # [n, top_k], the router's output


class LayerObserver(Protocol):
    """Passed to a model's `forward`. The tensors of a call are complete but change later; copy what you keep.

    They may have more rows than the step, and be on the device. n: rows of the step.
    """

    def embedding(self, x: Tensor) -> None:
        """Takes the input of the first layer, x: float32 [n, hidden]."""
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
        """Takes a layer's tensors, of any float dtype. after_attention: [n, hidden], the residual stream including
        attention's output. expert_input: [n, hidden], the norm of that, which router and experts read, before any
        rounding. routing: None for a layer without experts. expert_output: [n, hidden], the output of experts or
        feed-forward that is added to the residual stream."""
        ...
