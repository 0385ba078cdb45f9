"""Parses PEFT's tensor names. A name tells the layer, the product, and whether the tensor is A or B."""

from __future__ import annotations

import re
from typing import NamedTuple

from moeserve.models.sources.gguf import names as n

BASE_LAYER = ".base_layer"  # part of the inner module's name if a module has two adapted parameters
FUSED_EXPERTS = "mlp.experts"  # one module with the matrices of all experts of a layer (`target_parameters`)
# Gemma's names have no mlp before the experts.
_FUSED = tuple(f"{module}{suffix}" for module in (FUSED_EXPERTS, "experts") for suffix in ("", BASE_LAYER))

_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.default)?\.weight")
# Parts of multimodal models for images and audio, which have layers of their own.
_OTHER_TOWER = re.compile(r"(?:.*\.)?(?:visual|vision_tower|audio_tower)\..*")
_LAYER = re.compile(r"(?:base_model\.model\.)?(?:.*\.)?layers\.(?P<layer>\d{1,5})\.(?P<rest>.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?P<expert>\d{1,5})\.(?P<part>\w+)")
_MODULES = {
    "self_attn.q_proj": n.ATTN_Q,
    "self_attn.k_proj": n.ATTN_K,
    "self_attn.v_proj": n.ATTN_V,
    "self_attn.o_proj": n.ATTN_OUTPUT,
    "mlp.gate": n.FFN_GATE_INP,
    "mlp.router": n.FFN_GATE_INP,
    "router.proj": n.FFN_GATE_INP,
}
_FEED_FORWARDS = {
    "mlp": n.FFN_PARTS,
    "mlp.shared_expert": n.SHARED_PARTS,
    "mlp.shared_experts": n.SHARED_PARTS,
}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MODULES |= {
    f"{module}.{name}": part
    for module, parts in _FEED_FORWARDS.items()
    for name, part in zip(_PROJECTIONS, parts, strict=True)
}
_EXPERT_PARTS = dict(zip(_PROJECTIONS, n.EXPERT_PARTS, strict=True))


class TensorName(NamedTuple):
    module: str  # name in the model, without PEFT's prefix
    matrix: str  # "A" or "B"


class Place(NamedTuple):
    """The product that a module computes."""

    layer: int
    part: str  # a name of products.py; FUSED_EXPERTS: all experts together
    expert: int | None = None  # None: not a routed expert


def parse_name(name: str) -> TensorName | None:
    """Returns the module and the matrix that a PEFT tensor's name names. Returns None if the tensor is neither LoRA's A
    nor B."""
    match = _NAME.fullmatch(name)
    return (
        None
        if match is None
        else TensorName(match["module"].removeprefix("base_model.model."), match["matrix"])
    )


def place_of(module: str) -> Place | None:
    """Returns the module's product; None if this server cannot change it by adapters."""
    match = _LAYER.fullmatch(module)
    if match is None or _OTHER_TOWER.fullmatch(module):
        return None
    layer, rest = int(match["layer"]), match["rest"]
    if rest in _FUSED:
        return Place(layer, FUSED_EXPERTS)
    if expert := _EXPERT.fullmatch(rest):
        part = _EXPERT_PARTS.get(expert["part"])
        return None if part is None else Place(layer, part, int(expert["expert"]))
    part = _MODULES.get(rest)
    return None if part is None else Place(layer, part)
