"""The shapes of feed-forwards: one for all tokens, or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass, field

from moeserve.kernels.gating import OAI_ALPHA, Activation
from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.sources.gguf import names as n


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that all tokens pass, besides those that they are routed to."""

    width: int
    is_gated: bool  # its output is multiplied by sigmoid(gate . y)
    parts: tuple[str, str, str] = n.SHARED_PARTS  # GGUF names of its gate, up and down matrices
    activation: Activation = "silu"
    limit: float | None = None  # clamp of the activation: kernels/gating.py
    alpha: float = OAI_ALPHA  # as MoeShape.alpha


@dataclass(frozen=True, slots=True)
class MoeShape:
    """A mixture of `num_experts` feed-forwards; the router chooses `top_k` of them for each token."""

    num_experts: int
    top_k: int
    width: int  # of one expert
    router: RouterOptions = field(default_factory=RouterOptions)
    shared: SharedExpert | None = None
    router_bias: bool = False  # the router's product has a bias
    choice_bias: bool = False  # a bias is added to scores for choosing, but not to weights
    by_token: bool = False  # a table has each token id's experts; the router only weighs them
    activation: Activation = "silu"  # of the routed experts
    limit: float | None = None  # clamp of that activation: kernels/gating.py
    alpha: float = OAI_ALPHA  # of "swiglu_oai" and "situ"
    expert_bias: bool = False  # the routed experts' three products have biases
    expert_scale: bool = False  # a chosen expert's weight is multiplied by a factor of the expert
    weighs_input: bool = False  # routing weights multiply the experts' input instead of their output
    # In a sandwiched layer: outputs of shared and routed experts are normalised separately, and so are inputs of routed
    parts_normed: bool = False  # experts and router, whose norm's weight is divided by sqrt(hidden)
    parts: tuple[str, str, str] = n.EXPERT_PARTS  # GGUF names of gate (or up again), up and down
    latent: int = 0  # width of the experts' input and output, to and from which matrices project; 0: `hidden`
    latent_parts: tuple[str, str] = n.LATENT_PARTS  # GGUF names of these matrices
    latent_norm: str = ""  # GGUF name of a norm of the latent experts' sum; "": none


@dataclass(frozen=True, slots=True)
class DenseFfnShape:
    """One feed-forward that all tokens pass; no experts."""

    width: int
    activation: Activation = "silu"
    limit: float | None = None  # clamp of the activation: kernels/gating.py
    alpha: float = OAI_ALPHA  # as MoeShape.alpha
    parts: tuple[str, str, str] = n.FFN_PARTS  # as MoeShape.parts
