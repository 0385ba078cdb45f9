"""LoRA adapters with random matrices, written by PEFT itself, and what PEFT computes with them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ROUTER = "mlp.gate.weight"
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def write_adapter(
    folder: Path,
    base: PreTrainedModel,
    seed: int,
    *,
    size: float = 0.05,
    trained: bool = True,
    **settings: Any,
) -> PeftModel:
    """Writes an adapter of `base` into the folder; returns the model with it. size: the standard deviation of what B
    is made of, which PEFT would begin with zeros. trained: otherwise A and B stay as PEFT begins with them."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = get_peft_model(copy.deepcopy(base), LoraConfig(lora_dropout=0.0, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name and trained:
                parameter.normal_(std=size)
    model.save_pretrained(str(folder))
    return model.eval()


def logits_of(model: PreTrainedModel | PeftModel, tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), vocab]."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return found
