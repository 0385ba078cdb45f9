"""A tiny Llama-Nemotron (`nemotron-nas`) with random weights: transformers has no such model, so it is a Llama whose
layers are made one by one, with what some of them lack taken out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch

from tests.support.models.hugging_face_model import save_random
from tests.support.models.hugging_face_settings import SETTINGS

HIDDEN: Final = 256
HEADS: Final = 4
# Of each layer: query heads for one KV head, and the feed-forward's multiple; None: it has none.
BLOCKS: Final[tuple[tuple[int | None, float | None], ...]] = (
    (2, 1.5), (None, 3.0), (4, None), (None, None), (1, 0.5), (None, 1.0),
)  # fmt: skip


class _Nothing(torch.nn.Module):
    """In the place of a block: adds nothing to the residual."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        return torch.zeros_like(hidden_states)


class _NoAttention(_Nothing):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        return torch.zeros_like(hidden_states), None


def write_model(
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    blocks: tuple[tuple[int | None, float | None], ...] = BLOCKS,
) -> Any:
    """Writes the folder. Returns the model, with `dtype`'s weights in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    torch.manual_seed(7)
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    settings: dict[str, Any] = SETTINGS | {
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": len(blocks), "rope_parameters": rope,
        "pad_token_id": 0,
    }  # fmt: skip
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    for index, (group, multiple) in enumerate(blocks):
        model.model.layers[index] = _layer(settings, index, group, multiple)
    model.eval()
    save_random(model, folder, dtype)
    config = json.loads((folder / "config.json").read_text())
    for name in ("intermediate_size", "num_key_value_heads", "head_dim"):
        config[name] = None
    config |= {"model_type": "nemotron-nas", "block_configs": [_block(*block) for block in blocks]}
    (folder / "config.json").write_text(json.dumps(config))
    model.float()
    model.model.rotary_emb = LlamaRotaryEmbedding(
        model.config
    )  # its frequencies were rounded with the weights
    return model


def _layer(settings: dict[str, Any], index: int, group: int | None, multiple: float | None) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    width = -(-int(2 * (multiple or 1.0) * HIDDEN / 3) // 256) * 256
    own = LlamaConfig(**settings | {"intermediate_size": width, "num_key_value_heads": HEADS // (group or 1)})
    own._attn_implementation = "sdpa"  # as the model, which makes the masks
    layer: Any = LlamaDecoderLayer(own, index)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=settings["initializer_range"])
    if group is None:
        layer.self_attn, layer.input_layernorm = _NoAttention(), torch.nn.Identity()
    if multiple is None:
        layer.mlp, layer.post_attention_layernorm = _Nothing(), torch.nn.Identity()
    return layer


def _block(group: int | None, multiple: float | None) -> dict[str, Any]:
    """Returns a layer's settings as they are published."""
    attention = {"n_heads_in_group": group, "no_op": group is None, "window_length": None, "sparsify": None}
    ffn = {"ffn_mult": multiple, "no_op": multiple is None, "sparsify": None}
    return {
        "attention": attention
        | {"replace_with_linear": False, "num_sink_tokens": None, "unshifted_sink": False},
        "ffn": ffn | {"replace_with_linear": False},
    }
