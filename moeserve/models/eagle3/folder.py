"""An EAGLE-3 head's folder in Hugging Face's layout, as SGLang and vLLM read it: safetensors under GGUF's names.

Two forms are published: config.json of a Llama of one layer (`LlamaForCausalLMEagle3`), and the speculators library's,
with that config in `transformer_layer_config`. There is no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.eagle3.shape import ARCHITECTURE, IDS, INPUT_NORM, JOINED, THETA
from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface import HuggingFaceFolder, read_config
from moeserve.models.sources.huggingface.config_json import metadata_of, rope_of
from moeserve.models.sources.huggingface.folder import CONFIG
from moeserve.models.sources.huggingface.llama3_rope import is_llama3, llama3_rope, rope_factors
from moeserve.models.sources.huggingface.made_tensor import MadeTensor, bytes_of
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    HuggingFaceMapping,
    check_settings,
)
from moeserve.models.sources.huggingface.safetensors_file import StoredTensor, read_tensors, stored_numbers
from moeserve.models.sources.weight_files import weight_files
from moeserve.quantization.table import I64

_LAYER: Final = DECODER_LAYER | DENSE_FFN | {n.of_part("attn_norm_2"): "hidden_norm.weight"}
# Names outside the layer; those of `_OPTIONAL` may be missing.
_OUTSIDE: Final = {
    JOINED: "fc.weight",
    INPUT_NORM: "input_norm.weight",
    n.OUTPUT_NORM: "norm.weight",
    n.OUTPUT: "lm_head.weight",
    n.TOKEN_EMBD: "embed_tokens.weight",
}
_OPTIONAL: Final = (INPUT_NORM, n.OUTPUT, n.TOKEN_EMBD)
# Settings of variants that are computed otherwise: name -> the only supported value, which is the default, too.
_FIXED: Final = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "fc_norm": False,
    "use_aux_hidden_state": True,
    "sliding_window": None,
    "parallel_drafting": False,
}
_NORMS: Final = ("norm_before_residual", "norm_before_fc", "norm_output")
_IDS: Final = "eagle_aux_hidden_state_layer_ids"
_MAPPING: Final = HuggingFaceMapping(
    model_type="llama",
    keys=DECODER_KEYS | {"feed_forward_length": ("intermediate_size",)},
    fixed={name: (value, value) for name, value in _FIXED.items()},
    layer=_LAYER,
    rope=lambda path, config: _rope(path, config),
    rope_theta=THETA,
    made_of_none=rope_factors,
    metadata={n.ROPE_HALVES: True},
)


def _rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    return llama3_rope(path, config, THETA) if is_llama3(config) else rope_of(path, config, _MAPPING)


class DraftHeadFolder(HuggingFaceFolder):
    """An EAGLE-3 head's folder, as a `ModelSource`."""

    def __init__(
        self, path: Path, metadata: Metadata, stored: dict[str, StoredTensor], file_bytes: int
    ) -> None:
        ids = stored.pop(IDS, None)
        stored.pop("t2d", None)  # the same the other way round
        super().__init__(path, ARCHITECTURE, _MAPPING, metadata, stored, file_bytes)
        if ids is not None:
            self._add_made(IDS, _absolute(path, ids))

    def _names(self, stored: dict[str, StoredTensor]) -> Iterator[tuple[str, list[str]]]:
        for ours, theirs in _OUTSIDE.items():
            if theirs in stored or ours not in _OPTIONAL:
                yield ours, [theirs]
        yield from ((n.in_layer(0, ours), [f"layers.0.{theirs}"]) for ours, theirs in _LAYER.items())


def open_draft_head_folder(path: Path) -> DraftHeadFolder:
    """Opens and returns the folder of an EAGLE-3 head, with its tensors under the names that the engine uses; reads no
    weights. Raises ModelError for a file that is missing or damaged and for settings that are not supported."""
    config = _flat(path / CONFIG, read_config(path))
    check_settings(path / CONFIG, config, _MAPPING)
    values = metadata_of(path / CONFIG, config, ARCHITECTURE, _MAPPING) | _own(path / CONFIG, config)
    stored: dict[str, StoredTensor] = {}
    file_bytes = 0
    for file in weight_files(path):
        size, tensors = read_tensors(file)
        stored |= tensors
        file_bytes += size
    named = {_name(name): tensor for name, tensor in stored.items()}
    return DraftHeadFolder(path, Metadata(path, values), named, file_bytes)


def _name(name: str) -> str:
    """Returns a stored tensor's name in the form of `_OUTSIDE` and "layers.0."."""
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _flat(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the layer and of the head in one object."""
    inner, eagle = config.get("transformer_layer_config", {}), config.get("eagle_config", {})
    if not isinstance(inner, dict) or not isinstance(eagle, dict):
        raise SettingError(path, "'transformer_layer_config' and 'eagle_config' are expected to be objects")
    flat = dict(config) | inner | {name: value for name, value in eagle.items() if name != _IDS}
    if _IDS in eagle and flat.get(_IDS) is None:
        # SGLang's form: the layers whose outputs are read. vLLM's, outside this object: those whose inputs are.
        flat[_IDS] = [each + 1 if isinstance(each, int) else each for each in _list(path, eagle[_IDS])]
    return flat


def _list(path: Path, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise SettingError(path, f"{_IDS!r} is {value!r:.80}, a list is expected")
    return value


def _own(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns the settings of the head itself, under GGUF's keys."""
    values: dict[str, MetadataValue] = {
        **{name: config.get(name) is True for name in _NORMS},
        "target_hidden_size": config.get("target_hidden_size") or config.get("hidden_size") or 0,
    }
    if config.get(_IDS) is not None:
        taps = _list(path, config[_IDS])
        if not all(type(each) is int and 0 <= each < 1 << 16 for each in taps):
            raise SettingError(path, f"{_IDS!r} is {taps!r:.80}, numbers of layers are expected")
        values["target_layers"] = np.array(taps, np.int32)
    return {f"{ARCHITECTURE}.{key}": value for key, value in values.items()}


def _absolute(path: Path, ids: StoredTensor) -> MadeTensor:
    """Returns the ids of the scored tokens, which are stored less their own number."""
    if ids.dtype != "I64" or len(ids.shape) != 1:
        raise SettingError(
            path, f"tensor {IDS!r} is {ids.dtype} {list(ids.shape)}; a vector of I64 is expected"
        )

    def make() -> np.ndarray[Any, np.dtype[np.uint8]]:
        offsets = stored_numbers(ids).view(np.int64)
        return bytes_of(offsets + np.arange(len(offsets), dtype=np.int64))

    return MadeTensor(ids.shape, I64, (ids,), make)
