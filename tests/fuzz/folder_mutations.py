"""Hostile folders in Hugging Face's layout: JSON whose values were exchanged for others, and damaged safetensors."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.sources.splits import QWEN2
from tests.fuzz.gguf_mutations import EXPERTS, FF, HEAD_DIM, HEADS, KV_HEADS
from tests.support.models.gguf_bytes import MERGES, TOKEN_TYPES, TOKENS

HIDDEN = 64  # a block of NVFP4

_DEEP: Any = 1
for _ in range(60):
    _DEEP = [_DEEP]
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 31, 33, 1 << 31, 1 << 53, 1 << 64, 10**400, 1e308, 1e-308, 0.5, -0.0),
    *("", "x", "a b", "\0", "yarn", "linear", "default", "NFC", "../x", "model.safetensors", "x" * 70_000),
    *([], {}, [[]], {"a": 1}, [1, 2], ["a", "b"], [["a", "b"]], [["a"]], {"content": "a", "id": 0}, _DEEP),
)


def base_files() -> dict[str, Any]:
    """The folder's JSON files, as they should be."""
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": FF,
        "norm_topk_prob": True,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "vocab_size": len(TOKENS),
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        "eos_token_id": [TOKENS.index("<|im_end|>")],
    }
    added = [
        {"id": i, "content": piece, "special": kind == 3}
        for i, (piece, kind) in enumerate(zip(TOKENS, TOKEN_TYPES, strict=True))
        if kind in (3, 4)
    ]
    tokenizer = {
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": QWEN2.expression},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {piece: i for i, piece in enumerate(TOKENS) if TOKEN_TYPES[i] == 1},
            "merges": MERGES,
        },
    }
    return {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": "{{ 1 }}"},
        "generation_config.json": {"eos_token_id": TOKENS.index("<|im_end|>")},
    }


def _tensors() -> dict[str, tuple[int, ...]]:
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        layer + "self_attn.q_norm.weight": (HEAD_DIM,),
        layer + "self_attn.k_norm.weight": (HEAD_DIM,),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "mlp.gate.weight": (EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        prefix = f"{layer}mlp.experts.{expert}."
        shapes[prefix + "gate_proj.weight"] = shapes[prefix + "up_proj.weight"] = (FF, HIDDEN)
        shapes[prefix + "down_proj.weight"] = (HIDDEN, FF)
    return shapes


def write_hostile_folder(folder: Path, rng: random.Random) -> Path:
    """A mutation of a small model's folder, which it returns."""
    files = base_files()
    quantization = rng.choice((None, None, *QUANTIZATIONS))
    if quantization is not None:
        files["config.json"]["quantization_config"] = QUANTIZATIONS[quantization]
    header, body = _safetensors(quantization, rng)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        name = rng.choice((*files, "header", "index"))
        if name == "index":
            files["model.safetensors.index.json"] = {"weight_map": {"a": rng.choice(_VALUES)}}
        elif name == "header":
            header = _mutated(rng, header)
        else:
            files[name] = _mutated(rng, files[name])
    for name, content in files.items():
        if content is not None:
            (folder / name).write_bytes(_damaged(rng, json.dumps(content).encode()))
    encoded = json.dumps(header).encode()
    length = len(encoded) if rng.random() < 0.95 else rng.choice((0, 1 << 20, 1 << 40, (1 << 64) - 1))
    (folder / "model.safetensors").write_bytes(
        _damaged(rng, struct.pack("<Q", length) + encoded) + _damaged(rng, body)
    )
    return folder


def _safetensors(
    quantization: str | None = None, rng: random.Random | None = None
) -> tuple[dict[str, Any], bytes]:
    """The header and the bytes of a well-formed file; with `rng`, one part may lie about its shape or type."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    # The index of the part whose shape or type is false; often beyond the last.
    lie = -1 if rng is None else rng.randrange(64)
    for name, shape in _tensors().items():
        parts = {name: np.full(shape, 0.05, np.float16)}
        if quantization is not None and "_proj." in name:
            parts = _quantized(quantization, name.removesuffix(".weight"), shape)
        for part, stated in parts.items():
            numbers = (
                _lying(rng, stated) if rng is not None and lie == 0 and quantization is not None else stated
            )
            lie -= 1
            header[part] = {
                "dtype": _DTYPES[numbers.dtype.name],
                "shape": list(numbers.shape),
                "data_offsets": [len(body), len(body) + numbers.nbytes],
            }
            body += numbers.tobytes()
    return header, bytes(body)


def _lying(rng: random.Random, numbers: Any) -> Any:
    """Another tensor in the place of this one: a well-formed file whose parts do not fit one another."""
    match rng.randrange(8):
        case 0:
            return numbers.reshape(numbers.shape[::-1])
        case 1:
            return numbers[:0]
        case 2:
            return numbers[: rng.randrange(1, len(numbers) + 1)]
        case 3:
            return np.concatenate([numbers, numbers])
        case 4:
            return np.zeros(numbers.shape, rng.choice(("float16", "float32", "int32", "int64", "int8")))
        case 5:
            return numbers.reshape(-1)
        case 6:
            return (
                np.full(numbers.size * numbers.itemsize, rng.choice((0, 1, 127, 255)), np.uint8)
                .view(numbers.dtype)
                .reshape(numbers.shape)
            )
        case _:
            return np.zeros((), numbers.dtype)


QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "checkpoint_format": "gptq",
        "desc_act": False,
    },
    "gptq in act-order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "auto-round": {
        "quant_method": "auto-round",
        "bits": 4,
        "data_type": "int",
        "packing_format": "auto_round",
    },
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm", "modules_to_not_convert": ["gate"]},
    "packed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "block_structure": None}, "format": "pack-quantized"}
        },
        "sparsity_config": {"format": "dense"},
        "ignore": ["re:.*gate$"],
    },
    "int8": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "fp8 of blocks": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "nvfp4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "nvfp4 of ModelOpt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
}
# uint8 stands for 8-bit floats, bool for plain bytes.
_DTYPES = {
    "float16": "F16",
    "float32": "F32",
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint8": "F8_E4M3",
    "bool": "U8",
}


def _quantized(quantization: str, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """A matrix's parts, in groups of 32 columns."""
    rows, cols = shape
    groups = cols // 32
    match quantization:
        case "gptq" | "gptq in act-order" | "auto-round":
            of_column = np.arange(cols, dtype=np.int32) // 32
            if quantization == "gptq in act-order":
                of_column = of_column[np.random.default_rng(len(name)).permutation(cols)]
            parts: dict[str, Any] = {
                "qweight": np.full((cols // 8, rows), 0x12345678, np.int32),
                "qzeros": np.full((groups, rows // 8), 0x77777777, np.int32),
                "scales": np.full((groups, rows), 0.01, np.float16),
                "g_idx": of_column,
            }
        case "awq":
            parts = {
                "qweight": np.full((cols, rows // 8), 0x12345678, np.int32),
                "qzeros": np.full((groups, rows // 8), 0x77777777, np.int32),
                "scales": np.full((groups, rows), 0.01, np.float16),
            }
        case "packed":
            parts = {
                "weight_packed": np.full((rows, cols // 8), 0x12345678, np.int32),
                "weight_scale": np.full((rows, groups), 0.01, np.float16),
                "weight_zero_point": np.full((rows // 8, groups), 0x77777777, np.int32),
                "weight_shape": np.array(shape, np.int64),
            }
        case "int8":
            parts = {
                "weight": np.full(shape, 7, np.int8),
                "weight_scale": np.full((rows, 1), 0.01, np.float16),
            }
        case "nvfp4" | "nvfp4 of ModelOpt":
            is_modelopt = quantization == "nvfp4 of ModelOpt"
            parts = {
                "weight" if is_modelopt else "weight_packed": _plain_bytes((rows, cols // 2), 0x31),
                "weight_scale": np.full((rows, cols // 16), 0x38, np.uint8),
                "weight_scale_2" if is_modelopt else "weight_global_scale": np.full((1,), 0.05, np.float32),
            }
        case "mxfp4":
            parts = {
                "weight_packed": _plain_bytes((rows, cols // 2), 0x31),
                "weight_scale": _plain_bytes((rows, groups), 120),
            }
        case _:
            size = QUANTIZATIONS[quantization]["weight_block_size"][0]
            blocks = (-(-rows // size), -(-cols // size))
            parts = {
                "weight": np.full(shape, 0x38, np.uint8),
                "weight_scale_inv": np.full(blocks, 0.05, np.float32),
            }
    return {f"{name}.{part}": numbers for part, numbers in parts.items()}


def _plain_bytes(shape: tuple[int, ...], value: int) -> Any:
    return np.full(shape, value, np.uint8).view(np.bool_)


def _mutated(rng: random.Random, tree: Any) -> Any:
    """The tree with a value somewhere in it exchanged, left out or doubled."""
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.02:
        return rng.choice(_VALUES)
    if isinstance(tree, dict):
        key = rng.choice(list(tree))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in tree.items() if k != key}
            case 1:
                return tree | {rng.choice(("", "x", "\0", "rope_type", "factor")): rng.choice(_VALUES)}
            case _:
                return tree | {key: _mutated(rng, tree[key])}
    at = rng.randrange(len(tree))
    match rng.randrange(8):
        case 0:
            return tree[:at] + tree[at + 1 :]
        case 1:
            return [*tree, tree[at]]
        case _:
            return [*tree[:at], _mutated(rng, tree[at]), *tree[at + 1 :]]


def _damaged(rng: random.Random, content: bytes) -> bytes:
    if rng.random() > 0.05 or not content:
        return content
    damaged = bytearray(content)
    match rng.randrange(3):
        case 0:
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        case 1:
            del damaged[rng.randrange(len(damaged)) :]
        case 2:
            at = rng.randrange(len(damaged))
            damaged[at:at] = rng.choice((b"\\ud800", b"[" * 3000, b"\xff", b'"', b"1e999"))
    return bytes(damaged)
