"""Tiny random models in Hugging Face's layout, written by transformers itself. Its import takes seconds, and every
process that runs tests collects all of them: the first that needs it imports it."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tests.conftest import TINY_MODEL
from tests.support.models.hugging_face_settings import FAMILIES, INDEXED_FAMILIES, SETTINGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_model(folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 7, **changes: object) -> None:
    """A Qwen3-MoE. Weights in several files; the packaged model's tokenizer and chat template. `changes` are the
    config's."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    settings = SETTINGS | {"head_dim": 64, "norm_topk_prob": True} | changes
    save_random(Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)), folder, dtype)


def write_qwen2_moe(
    folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 7, **changes: object
) -> None:
    """The same for Qwen2-MoE, whose heads are as wide as the hidden size makes them."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(seed)
    settings = SETTINGS | {"shared_expert_intermediate_size": 160} | changes
    save_random(Qwen2MoeForCausalLM(Qwen2MoeConfig(**settings)), folder, dtype)


def write_family(
    folder: Path, model_type: str, dtype: torch.dtype = torch.bfloat16, seed: int = 7, **changes: object
) -> Any:
    """A model of one of FAMILIES or INDEXED_FAMILIES. Gives transformers' class of it, to be read again."""
    import transformers

    torch.manual_seed(seed)
    config_name, model_name, own = (FAMILIES | INDEXED_FAMILIES)[model_type]
    config, model = getattr(transformers, config_name), getattr(transformers, model_name)
    save_random(model(config(**(SETTINGS | own | changes))), folder, dtype)
    return model


def write_published_qwen35(folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> Any:
    """A Qwen3.5 as it is published: with vision, experts merged. Gives transformers' class of the text's model."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration

    torch.manual_seed(seed)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
              "out_hidden_size": SETTINGS["hidden_size"]}  # fmt: skip
    own = FAMILIES["qwen3_5_moe_text"][2]
    config = Qwen3_5MoeConfig(text_config=SETTINGS | own, vision_config=vision)
    save_random(Qwen3_5MoeForConditionalGeneration(config), folder, dtype)
    merge_experts(folder)
    return Qwen3_5MoeForCausalLM


def write_published_gemma(folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> Any:
    """A Gemma 4 as it is published: with vision, and settings of the layers that see all. Gives transformers' class."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    torch.manual_seed(seed)
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 64}  # fmt: skip
    own = SETTINGS | FAMILIES["gemma4_text"][2]
    save_random(
        Gemma4ForConditionalGeneration(Gemma4Config(text_config=own, vision_config=vision)), folder, dtype
    )
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["per_layer_config"]
    config["text_config"] |= {key: own[key] for key in ("global_head_dim", "num_global_key_value_heads")}
    (folder / "config.json").write_text(json.dumps(config))
    return Gemma4ForConditionalGeneration


def write_wrapped(model: PreTrainedModel, folder: Path) -> None:
    """A model that sees as well as reads, in float32, with weights of its own."""
    save_random(model, folder, torch.float32)


def read_model(folder: Path) -> Any:
    """transformers' model of a folder, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def merge_experts(folder: Path) -> None:
    """Rewrites the weights in one file, each layer's experts as gate_up_proj and down_proj."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    for first in [name for name in tensors if name.endswith(".experts.0.gate_proj.weight")]:
        prefix = first.removesuffix("0.gate_proj.weight")
        experts = range(
            sum(name.startswith(prefix) and name.endswith("gate_proj.weight") for name in tensors)
        )
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{e}.{part}_proj.weight") for e in experts])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}down_proj": down}
    save_file(tensors, folder / "model.safetensors")


def save_random(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Norms and biases as in no fresh model, where they are 1 and 0: they must be read."""
    torch.nn.Module.to(model, dtype)  # in place; transformers' own `to` has no usable annotation
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.randn_like(parameter) - 1)
            elif "norm" in name or name.endswith(("router.scale", "per_expert_scale")):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith(("bias", "sinks")):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif ".experts." in name or name.endswith(("gate.weight", "router.weight", "router.proj.weight")):
                parameter.copy_(0.15 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
            elif name.endswith("layer_scalar"):
                buffer.copy_(0.9 + 0.1 * torch.rand_like(buffer))
    model.save_pretrained(folder, max_shard_size="1MB")
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)


@functools.cache
def tokenizer_files() -> dict[str, bytes]:
    """The tiny model's tokenizer as transformers writes it, read once: transformers takes 1.2 s for the GGUF."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        AutoTokenizer.from_pretrained(TINY_MODEL.parent, gguf_file=TINY_MODEL.name).save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
