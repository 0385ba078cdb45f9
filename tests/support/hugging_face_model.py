"""A tiny random Qwen3-MoE in Hugging Face's layout, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.conftest import TINY_MODEL

VOCAB_ROWS = 4128  # of the embedding: 32 more than there are tokens, as in the published models


def write_model(folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 7, **changes: object) -> None:
    """Weights in several files; the packaged model's tokenizer and chat template. `changes` are the config's."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_ROWS,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,  # large enough for distributions with a shape
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "eos_token_id": [4089, 4087],
    } | changes
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))
    torch.nn.Module.to(model, dtype)  # in place; transformers' own `to` has no usable annotation
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="1MB")
    AutoTokenizer.from_pretrained(TINY_MODEL.parent, gguf_file=TINY_MODEL.name).save_pretrained(folder)
