"""Reads the scaling of RoPE from a model's metadata."""

from __future__ import annotations

import math

from moeserve.models.rope_scaling import RopeScaling
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n

_FACTOR, _OLD_FACTOR = "rope.scaling.factor", "rope.scale_linear"
_TYPE = "rope.scaling.type"
_WHOLE_FACTOR = "rope.scaling.yarn_attn_factor"  # of cos and sin: in place of YaRN's own


def read_rope_scaling(
    metadata: Metadata, architecture: str, context_length: int, *, yarn_truncates: bool
) -> RopeScaling:
    """Reads RoPE's scaling from the metadata, and returns it; RopeScaling() if there is none. context_length: the
    model's, in tokens. yarn_truncates: `RopeScaling.truncate` where the file does not state it. Raises ModelError for
    settings that are out of range or contradict one another."""

    def key(suffix: str) -> str:
        return f"{architecture}.{suffix}"

    factor = _factor(metadata, key(_OLD_FACTOR), key(_FACTOR))
    # In older files a factor without a type means linear scaling.
    kind = metadata.require_str(key(_TYPE), default="none" if factor == 1.0 else "linear")
    if kind not in ("none", "linear", "yarn"):
        raise metadata.error(
            key(_TYPE), f"is {kind!r}, which is not supported; supported are none, linear, yarn"
        )
    if kind != "yarn":
        _refuse_yarn(metadata, architecture, kind)
    if kind == "none":
        return RopeScaling()
    if factor < 1.0:
        raise metadata.error(key(_FACTOR), f"is {factor}; only 1.0 or more is supported")
    if kind == "linear":
        return RopeScaling("linear", factor)
    metadata.require_float(key("rope.scaling.yarn_ext_factor"), 1.0, 1.0, 1.0)
    beta_slow = metadata.require_float(key("rope.scaling.yarn_beta_slow"), 1e-3, 1e6, 1.0)
    original = metadata.require_int(key("rope.scaling.original_context_length"), 1, 1 << 24, context_length)
    attn_factor = metadata.require_float(key("rope.scaling.attn_factor"), 1e-3, 1e3, 1.0)
    if key(_WHOLE_FACTOR) in metadata:
        attn_factor = metadata.require_float(key(_WHOLE_FACTOR), 1e-3, 1e3) / (1.0 + 0.1 * math.log(factor))
    return RopeScaling(
        type="yarn",
        factor=factor,
        original_context_length=original,
        attn_factor=attn_factor,
        beta_fast=metadata.require_float(key("rope.scaling.yarn_beta_fast"), beta_slow, 1e6, 32.0),
        beta_slow=beta_slow,
        truncate=metadata.require_bool(key(n.YARN_TRUNCATE), yarn_truncates),
    )


def _factor(metadata: Metadata, old: str, new: str) -> float:
    """Reads the factor; 1.0 if no key states one. Raises ModelError if the key and its older name differ."""
    linear = metadata.require_float(old, 0.0, 1024.0, 0.0)
    factor = metadata.require_float(new, 0.0, 1024.0, linear)
    if linear and factor and linear not in (1.0, factor):
        raise metadata.error(old, f"is {linear}, and {_FACTOR} {factor}: they do not agree")
    return factor or 1.0


def _refuse_yarn(metadata: Metadata, architecture: str, kind: str) -> None:
    """Raises ModelError for a setting of YaRN that llama.cpp applies to other kinds of scaling, too."""
    for suffix, neutral in (
        ("rope.scaling.attn_factor", (1.0,)),
        (_WHOLE_FACTOR, (1.0,)),
        ("rope.scaling.yarn_ext_factor", (0.0, -1.0)),  # negative: by the kind of scaling
    ):
        key = f"{architecture}.{suffix}"
        value = metadata.require_float(key, -1e6, 1e6, neutral[0])
        if value not in neutral:
            raise metadata.error(key, f"is {value}; with {_TYPE} {kind!r} it is supported without")
