"""Files and folders that only draft for another model, by reading its hidden states: EAGLE heads, DFlash and others.
They are recognised so that the error can name them and what to use instead. EAGLE-3 heads are served beside their
model: models/eagle3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface import is_hugging_face_folder, read_config
from moeserve.models.sources.source import TensorSource

# `general.architecture` of llama.cpp's GGUF files
_ARCHITECTURES: Final = {
    "eagle3": "an EAGLE-3 head",
    "dflash": "a DFlash head",
    "dflash-draft": "a DFlash head",
    "dspark": "a DSpark head",
}
# Parts of the class names in `architectures` of config.json, in lower case.
_CLASSES: Final = {
    "eagle": "an EAGLE head",
    "dflash": "a DFlash head",
    "dspark": "a DSpark head",
    "medusa": "Medusa heads",
    "mlpspeculator": "an MLP speculator",
}
ADVICE: Final = (
    "that is not supported: use --speculative-config "
    """'{"method": "auto", "num_speculative_tokens": 3}', or --speculative-model with a small model of the same """
    "vocabulary"
)


# Of an EAGLE-3 head that is named as the model.
_BESIDE: Final = "name its model as --model, and this as --speculative-model"


def is_eagle3_folder(path: Path) -> bool:
    """Returns whether a folder in Hugging Face's layout is an EAGLE-3 head's. Raises ModelError for a config.json that
    cannot be read."""
    if not is_hugging_face_folder(path):
        return False
    config = read_config(path)
    classes = config.get("architectures")
    names = [str(name).lower() for name in classes] if isinstance(classes, list) else []
    return config.get("speculators_model_type") == "eagle3" or any("eagle3" in name for name in names)


def refuse_draft_head(path: Path, architecture: str) -> None:
    """Raises ModelError if a GGUF file of this architecture only drafts for another model."""
    kind = _ARCHITECTURES.get(architecture)
    if kind is None and architecture.endswith(("-assistant", "_assistant")):
        kind = "an assistant"
    if kind is not None:
        _refuse(path, kind, architecture)


def refuse_block_alone(source: TensorSource) -> None:
    """Raises ModelError if a file contains only a model's next-token block, without the model; some are published
    so."""
    has_block = any(name.endswith(n.of_part(n.NEXTN_EH_PROJ)) for name in source.tensors)
    if has_block and n.of_layer(0, n.ATTN_NORM) not in source.tensors:
        raise ModelError(
            source.path,
            "this file has only a model's next-token block (MTP), without the model; choose a GGUF of the model that "
            "has the "
            'block, with --speculative-config {"method": "mtp", "num_speculative_tokens": 3}',
        )


def refuse_draft_head_folder(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError if config.json at `path` is of a model that only drafts for another."""
    classes = config.get("architectures")
    for name in classes if isinstance(classes, list) else ():
        kind = next((kind for part, kind in _CLASSES.items() if part in str(name).lower()), None)
        if kind is not None:
            _refuse(path, kind, name)
    name = config.get("speculators_model_type")
    if isinstance(name, str):
        _refuse(path, "a speculator", name)


def _refuse(path: Path, kind: str, name: str) -> NoReturn:
    advice = _BESIDE if "eagle3" in name.lower() else ADVICE
    raise ModelError(
        path, f"this is {kind} ({name}), which drafts from another model's hidden states; {advice}"
    )
