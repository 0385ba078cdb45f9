"""What a model shows of its inside to whoever asks: one call a layer, the same tensors from every engine."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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
        router_logits: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        expert_output: Tensor,
    ) -> None:
        """after_attention: [n, hidden], the residual stream with the attention block's output in it. expert_input:
        [n, hidden], its norm, which router and experts read, before it is rounded for them where it is. router_logits:
        [n, experts]. expert_ids: int32 [n, top_k]; expert_weights: [n, top_k], as the router gives them. expert_output:
        [n, hidden], what the experts add to the residual stream. Floats of any width."""
        ...
