"""The options by which a MoE layer's router turns logits into experts and weights. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Scoring = Literal["softmax", "sigmoid", "sqrt_softplus", "softmax_topk"]


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """The arithmetic of a router; the defaults are Qwen3-MoE's. `reference.py` is the specification.

    Experts are chosen by score plus bias (a tensor passed beside these options, which affects only the choice); ties
    go to the lower id. The weights are the chosen experts' scores without the bias.
    """

    # softmax, sigmoid, sqrt_softplus: scores from all experts' logits, the last the root of log(1 + exp(logit)).
    # softmax_topk: the logits choose, and the weights are the softmax of the chosen logits (gpt-oss), whatever
    # `normalize` is.
    scoring: Scoring = "softmax"
    normalize: bool = True  # divide the weights by their sum
    scale: float = 1.0  # multiplies the weights, last
    # Group-limited choice (DeepSeek-V3, https://arxiv.org/abs/2412.19437): the experts are divided into `groups` equal
    # ranges. A range's score is the sum of its `group_best` best biased scores, and only experts of the `top_groups`
    # best ranges can be chosen; in DeepSeek-V2 (https://arxiv.org/abs/2405.04434) a range's score is its best one.
    groups: int = 1
    top_groups: int = 1
    group_best: Literal[1, 2] = 2

    def __post_init__(self) -> None:
        if self.scoring not in get_args(Scoring):
            raise ValueError(f"scoring {self.scoring!r} is none of {', '.join(get_args(Scoring))}")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups {self.top_groups} is not from 1 to {self.groups} groups")
        if self.group_best not in (1, 2):
            raise ValueError(f"group_best {self.group_best} is neither 1 nor 2")

    def check(self, experts: int, top_k: int) -> None:
        """Raises ValueError if a router of `experts` experts cannot choose top_k of them with these options."""
        if experts % self.groups:
            raise ValueError(f"{experts} experts do not divide into {self.groups} groups")
        if not 1 <= top_k <= experts // self.groups * self.top_groups:
            raise ValueError(
                f"top_k {top_k} of {experts} experts: {self.top_groups} of {self.groups} groups do not have as many"
            )


DEFAULT_ROUTER = RouterOptions()
