"""Tiny random models in Hugging Face's layout, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.conftest import TINY_MODEL

VOCAB_ROWS = 4128  # of the embedding: 32 more than there are tokens, as in the published models

SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB_ROWS,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # large enough for distributions with a shape
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "eos_token_id": [4089, 4087],
}


def write_model(folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 7, **changes: object) -> None:
    """A Qwen3-MoE. Weights in several files; the packaged model's tokenizer and chat template. `changes` are the
    config's."""
    torch.manual_seed(seed)
    settings = SETTINGS | {"head_dim": 64, "norm_topk_prob": True} | changes
    _write(Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)), folder, dtype)


def write_qwen2_moe(
    folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 7, **changes: object
) -> None:
    """The same for Qwen2-MoE, whose heads are as wide as the hidden size makes them."""
    torch.manual_seed(seed)
    settings = SETTINGS | {"shared_expert_intermediate_size": 160} | changes
    _write(Qwen2MoeForCausalLM(Qwen2MoeConfig(**settings)), folder, dtype)


def _write(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Norms and biases as in no fresh model, where they are 1 and 0: they must be read."""
    torch.nn.Module.to(model, dtype)  # in place; transformers' own `to` has no usable annotation
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="1MB")
    AutoTokenizer.from_pretrained(TINY_MODEL.parent, gguf_file=TINY_MODEL.name).save_pretrained(folder)
