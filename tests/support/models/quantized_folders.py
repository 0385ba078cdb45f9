"""Checkpoints of 4 and 8 bits, written as their publishers lay them out, beside the same weights dequantised."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Parts = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LINEAR = re.compile(r"model\.layers\..*_proj[a-z_]*\.weight|model\.layers\..*proj_qkvz\.weight")


@dataclass(frozen=True)
class Scheme:
    """How matrices are quantised, and what config.json says of it."""

    name: str
    write: Callable[
        [Scheme, str, torch.Tensor], tuple[Parts, torch.Tensor]
    ]  # the parts, and the matrix dequantised
    config: dict[str, Any] = field(default_factory=dict)
    bits: int = 4
    group: int = 128  # columns; 0: a row's
    symmetric: bool = False
    dtype: torch.dtype = torch.float16


def _integers(scheme: Scheme, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in], scales and zero points [out, groups], rounded to the nearest."""
    out, cols = weight.shape
    groups = weight.float().reshape(out, -1, scheme.group or cols)
    most = (1 << scheme.bits) - 1
    if scheme.symmetric:
        scales = (groups.abs().amax(-1) * 2 / most).to(scheme.dtype)
        zeros = torch.full(scales.shape, (most + 1) // 2)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / most).to(scheme.dtype)
        zeros = (
            (-low / scales.float()).round().clamp(1, most).long()
        )  # GPTQ's first form cannot store a 0 alone
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most).long()
    return codes.reshape(out, cols), scales, zeros


def _dequantized(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    groups = codes.reshape(*scales.shape, -1) - zeros[..., None]
    return (groups.float() * scales.float()[..., None]).reshape(codes.shape)


def _words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Packs codes along the last dimension into int32; the first has the lowest bits, unless `order` says otherwise."""
    if bits == 3:
        return _stream_words(codes, bits)
    each = 32 // bits
    missing = -codes.shape[-1] % each
    parts = torch.nn.functional.pad(codes, (0, missing)).unflatten(-1, (-1, each))
    words = sum(parts[..., (order or range(each))[i]] << bits * i for i in range(each))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous()


def _stream_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The same for codes that cross words, as GPTQModel packs 3 bits: code i has bits 3 i to 3 i + 2 of a stream."""
    spread = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 32)).unflatten(-1, (-1, 32))
    words = torch.zeros(*spread.shape[:-1], bits, dtype=torch.int64)
    for i in range(32):
        word, shift = divmod(bits * i, 32)
        words[..., word] |= spread[..., i] << shift & 0xFFFFFFFF
        if shift + bits > 32:
            words[..., word + 1] |= spread[..., i] >> 32 - shift
    words = words.flatten(-2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous()


def write_gptq(scheme: Scheme, name: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    codes, scales, zeros = _integers(scheme, weight)
    packing = scheme.config.get("packing_format", "gptq")
    less = 0 if scheme.config.get("checkpoint_format") == "gptq_v2" or packing in GPTQ_V2_PACKINGS else 1
    cols = weight.shape[1]
    order = torch.arange(cols)  # quantised column j is column order[j] of the matrix
    if scheme.config.get("desc_act"):
        order = torch.randperm(cols, generator=torch.Generator().manual_seed(seed_of(name)))
        codes, scales, zeros = _integers(scheme, weight[:, order])
    inverse = order.argsort()
    parts = {
        "qweight": _words(codes[:, inverse], scheme.bits).T.contiguous(),
        "qzeros": _words(zeros.T - less, scheme.bits),
        "scales": scales.T.contiguous(),
        "g_idx": (inverse // (scheme.group or cols)).int(),
    }
    dequantized = _dequantized(codes, scales, zeros)[:, inverse]
    return {f"{name}.{part}": t for part, t in parts.items()}, dequantized


GPTQ_V2_PACKINGS = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2")


def seed_of(name: str) -> int:
    """The same for matrices over one input, as quantisers order by it; in the second layer another for each."""
    group = re.sub("[qkv]_proj$", "qkv", re.sub("(gate|up)_proj$", "gate_up", name))
    return zlib.crc32((name if ".layers.1." in name else group).encode())


def write_awq(scheme: Scheme, name: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    codes, scales, zeros = _integers(scheme, weight)
    parts = {
        "qweight": _words(codes.T, 4, AWQ_ORDER),
        "qzeros": _words(zeros.T, 4, AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }
    return {f"{name}.{part}": t for part, t in parts.items()}, _dequantized(codes, scales, zeros)


def write_packed(scheme: Scheme, name: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """compressed-tensors' pack-quantized."""
    codes, scales, zeros = _integers(scheme, weight)
    parts = {
        "weight_packed": _words(codes, scheme.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not scheme.symmetric:
        parts["weight_zero_point"] = _words(zeros.T, scheme.bits).T.contiguous()
    return {f"{name}.{part}": t for part, t in parts.items()}, _dequantized(codes, scales, zeros)


def write_signed(scheme: Scheme, name: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """compressed-tensors' int-quantized, with a scale of its activations that nothing here needs."""
    codes, scales, zeros = _integers(scheme, weight)
    parts = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales, "input_scale": torch.ones(1)}
    return {f"{name}.{part}": t for part, t in parts.items()}, _dequantized(codes, scales, zeros)


BLOCK = 128
FP4_LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def write_fp8_blocks(scheme: Scheme, name: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """A scale for each block of 128 rows and columns."""
    rows, cols = weight.shape
    sizes = [-(-size // BLOCK) for size in weight.shape]
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    most = padded.abs().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax((1, 3))
    scales = (most / 448).to(scheme.dtype)
    assert scales.shape == tuple(sizes)
    spread = scales.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :cols]
    codes = (weight.float() / spread).to(torch.float8_e4m3fn)
    suffix = "_scale_inv" if scheme.config["quant_method"] == "fp8" else "_scale"
    return {f"{name}.weight": codes, f"{name}.weight{suffix}": scales}, codes.float() * spread


def _fp4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in units of their scale to the nearest E2M1: codes and values, in the shape given."""
    nearest = (groups.abs()[..., None] - FP4_LEVELS).abs().argmin(-1)
    codes = nearest + 8 * (groups < 0)
    return codes, torch.where(groups < 0, -FP4_LEVELS[nearest], FP4_LEVELS[nearest])


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the low bits."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def write_nvfp4(scheme: Scheme, name: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """compressed-tensors' form, or ModelOpt's."""
    groups = weight.float().unflatten(1, (-1, 16))
    own = groups.abs().max() / (6 * 448)  # the largest scale is then that of 8 bits
    scales = (groups.abs().amax(-1) / 6 / own).to(torch.float8_e4m3fn)
    if scheme.config["quant_method"] == "modelopt":
        spread = scales.float() * own
        more = {"weight_scale_2": own, "input_scale": torch.tensor(1.0)}
    else:
        divisor = (1 / own).reshape(1)
        spread = scales.float() / divisor
        more = {"weight_global_scale": divisor, "input_global_scale": torch.ones(1)}
    codes, values = _fp4(groups / spread[..., None].clamp(min=1e-30))
    weights = "weight" if scheme.config["quant_method"] == "modelopt" else "weight_packed"
    parts = {weights: _pairs(codes.flatten(1)), "weight_scale": scales} | more
    return {f"{name}.{part}": t for part, t in parts.items()}, (values * spread[..., None]).flatten(1)


def write_mxfp4(scheme: Scheme, name: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    groups = weight.float().unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).clamp(min=1e-20).log2().ceil()
    codes, values = _fp4(groups / 2 ** exponents[..., None])
    parts = {"weight_packed": _pairs(codes.flatten(1)), "weight_scale": (exponents + 127).to(torch.uint8)}
    spread = (2**exponents)[..., None]
    return {f"{name}.{part}": t for part, t in parts.items()}, (values * spread).flatten(1)


def write_fp8(scheme: Scheme, name: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """A scale for each row (group 0) or the matrix (group -1)."""
    most = weight.abs().amax(1, keepdim=True) if scheme.group == 0 else weight.abs().amax().reshape(1)
    scales = (most.float() / 448).to(scheme.dtype)
    codes = (weight.float() / scales.float()).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, codes.float() * scales.float()


def _compressed(form: str, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": more}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None}  # fmt: skip


_GPTQ: dict[str, Any] = {"quant_method": "gptq", "desc_act": False, "sym": False}
_AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
SCHEMES = (
    Scheme("gptq", write_gptq, _GPTQ | {"bits": 4, "group_size": 128}),
    Scheme("gptq-32", write_gptq, _GPTQ | {"checkpoint_format": "gptq"}, group=32, dtype=torch.bfloat16),
    Scheme("gptq-row-v2", write_gptq, _GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1}, group=0),
    Scheme("gptq-order", write_gptq, _GPTQ | {"desc_act": True}, group=32),
    Scheme("gptq-order-8", write_gptq, _GPTQ | {"desc_act": True, "bits": 8}, bits=8, group=128),
    Scheme("gptq-2", write_gptq, _GPTQ | {"bits": 2}, bits=2, group=64),
    Scheme("gptq-3", write_gptq, _GPTQ | {"bits": 3}, bits=3, group=128),
    Scheme("gptq-3-order", write_gptq, _GPTQ | {"bits": 3, "desc_act": True}, bits=3, group=64, dtype=torch.bfloat16),
    Scheme("auto-round-2", write_gptq, _ROUND | {"packing_format": "auto_round"}, bits=2, group=128, symmetric=True),
    Scheme("auto-round-asym", write_gptq, _ROUND | {"packing_format": "auto_round"}, group=32),
    Scheme("auto-round-v2", write_gptq, _ROUND | {"packing_format": "auto_round:gptqmodel"}, group=128),
    Scheme("gptq-8", write_gptq, _GPTQ | {"bits": 8}, bits=8, group=32),
    Scheme("gptq-8-sym", write_gptq, _GPTQ | {"bits": 8}, bits=8, symmetric=True),
    Scheme("auto-round", write_gptq, _ROUND, symmetric=True, group=64),
    Scheme("awq", write_awq, _AWQ | {"modules_to_not_convert": ["mlp.gate"]}),
    Scheme("awq-64", write_awq, _AWQ | {"modules_to_not_convert": None}, group=64),
    Scheme("w4a16", write_packed, _compressed("pack-quantized", num_bits=4), symmetric=True, dtype=torch.bfloat16),
    Scheme("w4a16-asym", write_packed, _compressed("pack-quantized", num_bits=4), group=32),
    Scheme("w4a16-32", write_packed, _compressed("pack-quantized", num_bits=4), group=32, symmetric=True,
           dtype=torch.bfloat16),
    Scheme("w8a16-64", write_packed, _compressed("pack-quantized", num_bits=8), bits=8, group=64, symmetric=True),
    Scheme("w8a16", write_packed, _compressed("pack-quantized", num_bits=8), bits=8, group=0, symmetric=True),
    Scheme("w8a8", write_signed, _compressed("int-quantized", num_bits=8), bits=8, group=0, symmetric=True,
           dtype=torch.bfloat16),
    Scheme("fp8-row", write_fp8, _compressed("float-quantized", num_bits=8), group=0, dtype=torch.bfloat16),
    Scheme("fp8-block", write_fp8_blocks, _FP8 | {"weight_block_size": [128, 128]}, dtype=torch.float32),
    Scheme("fp8-block-ct", write_fp8_blocks, _compressed("float-quantized", num_bits=8, block_structure=[128, 128]),
           dtype=torch.bfloat16),
    Scheme("nvfp4", write_nvfp4, _compressed("nvfp4-pack-quantized", num_bits=4)),
    Scheme("nvfp4-modelopt", write_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    Scheme("mxfp4", write_mxfp4, _compressed("mxfp4-pack-quantized", num_bits=4)),
    Scheme("fp8-matrix", write_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}, group=-1, dtype=torch.float32),
)  # fmt: skip
BY_NAME = {scheme.name: scheme for scheme in SCHEMES}


def quantize_folder(floats: Path, quantized: Path, scheme: Scheme) -> None:
    """Writes `quantized` from a folder of floats, whose own matrices become the dequantised ones."""
    shutil.copytree(floats, quantized)
    for file in floats.glob("*.safetensors"):
        theirs: Parts = {}
        ours = load_file(file)
        for name, tensor in list(ours.items()):
            if LINEAR.fullmatch(name):
                parts, ours[name] = scheme.write(scheme, name.removesuffix(".weight"), tensor)
                ours[name] = ours[name].to(tensor.dtype)
                theirs |= parts
            else:
                theirs[name] = tensor
        save_file(theirs, quantized / file.name)
        save_file(ours, file)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.config}))
    index = quantized / "model.safetensors.index.json"
    if index.exists():
        files = {name: f.name for f in quantized.glob("*.safetensors") for name in load_file(f)}
        index.write_text(json.dumps({"weight_map": files}))


def write_pair(of_floats: Path, tmp_path: Path, scheme: Scheme) -> tuple[Path, Path]:
    """The model quantised, and the same dequantised."""
    tmp_path.mkdir(exist_ok=True)
    shutil.copytree(of_floats, tmp_path / "floats")
    quantize_folder(tmp_path / "floats", tmp_path / "quantized", scheme)
    return tmp_path / "quantized", tmp_path / "floats"


def edit_quantization(folder: Path, **changes: Any) -> None:
    """Changes keys of quantization_config; None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    settings = config["quantization_config"] | changes
    config["quantization_config"] = {key: value for key, value in settings.items() if value is not None}
    path.write_text(json.dumps(config))


def replace_part(folder: Path, end: str, tensor: torch.Tensor) -> None:
    """The first tensor whose name ends so."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        name = next((name for name in tensors if name.endswith(end)), None)
        if name is not None:
            save_file(tensors | {name: tensor}, file)
            return
    raise AssertionError(end)
