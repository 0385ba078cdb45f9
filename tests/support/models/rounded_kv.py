"""Rounds k and v of transformers' models as the KV cache does, so that logits can be compared exactly."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def round_kv(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds k and v, or latent vectors, to 16 bits, as the KV cache holds them; all else stays float32. The rounding
    alone makes a difference of 1.2e-6."""
    text = getattr(model.model, "language_model", model.model)  # within a model that sees
    module = sys.modules[type(text).__module__]
    if module.__name__.endswith(("gemma4", "gemma4_unified")):
        _round_kv_of_gemma(text, module, monkeypatch)
        return
    rotates = getattr(model.config, "position_embedding_type", None) == "rope"
    if module.__name__.endswith(("nemotron_h", "granitemoehybrid")) and not rotates:
        for projection in (
            each for name, each in model.named_modules() if name.endswith(("k_proj", "v_proj"))
        ):
            projection.register_forward_hook(lambda module, inputs, output: output.half().float())
        return
    names = ("apply_rotary_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")
    name = next(name for name in names if hasattr(module, name))
    rotate = getattr(module, name)

    def rotate_and_round(q: torch.Tensor, k: torch.Tensor, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k = rotate(q, k, *tables)
        return q, k if is_normed_after else k.half().float()

    is_normed_after = module.__name__.endswith(("hunyuan_v1_moe", "hunyuan_v1_dense"))
    monkeypatch.setattr(module, name, rotate_and_round)
    for layer in text.layers:
        if not hasattr(layer, "self_attn") or hasattr(layer.self_attn, "forget_gate"):
            continue  # it is recurrent
        if not any(True for _ in layer.self_attn.parameters()):
            continue  # it does not attend
        if is_normed_after:
            layer.self_attn.key_layernorm.register_forward_hook(lambda module, inputs, k: k.half().float())
        if hasattr(layer.self_attn, "qkv_proj"):
            width = layer.self_attn.num_key_value_heads * layer.self_attn.head_dim
            layer.self_attn.qkv_proj.register_forward_hook(
                lambda module, inputs, output, width=width: torch.cat(
                    [output[..., :-width], output[..., -width:].half().float()], dim=-1
                )
            )
            continue
        if not _rotates(layer.self_attn):
            layer.self_attn.k_proj.register_forward_hook(lambda module, inputs, k: k.half().float())
        is_latent = hasattr(layer.self_attn, "kv_a_layernorm")
        cached = layer.self_attn.kv_a_layernorm if is_latent else layer.self_attn.v_proj
        scale = getattr(layer.self_attn, "v_scale", 1.0)
        cached.register_forward_hook(
            lambda module, inputs, output, scale=scale: (output * scale).half().float() / scale
        )


def _rotates(attention: torch.nn.Module) -> bool:
    """Whether a layer of a family of which some have no positions rotates."""
    if type(attention).__name__ == "Cohere2Attention":
        return attention.sliding_window is not None
    return bool(getattr(attention, "use_rope", True))


def _round_kv_of_gemma(text: Any, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds Gemma's k and v where a layer has its own: k is rotated right behind its norm, and v is normalised."""
    rotate, keys = module.apply_rotary_pos_emb, list[torch.Tensor]()

    def rotate_and_round(x: torch.Tensor, *tables: torch.Tensor, **options: int) -> torch.Tensor:
        rotated: torch.Tensor = rotate(x, *tables, **options)
        return rotated.half().float() if keys and keys.pop() is x else rotated

    monkeypatch.setattr(module, "apply_rotary_pos_emb", rotate_and_round)
    for attention in (layer.self_attn for layer in text.layers if hasattr(layer.self_attn, "k_norm")):
        attention.k_norm.register_forward_hook(lambda module, inputs, k: keys.append(k))
        attention.v_norm.register_forward_hook(lambda module, inputs, output: output.half().float())
