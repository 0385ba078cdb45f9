"""Opens an `mmproj` GGUF, or a folder in Hugging Face's layout, and reads its tower's shape. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.gguf import open_gguf
from moeserve.models.sources.huggingface import open_tower_folder
from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.shapes import gemma3, gemma4, glm4v, kimi_k25, llama_4, minimax_m3, qwen3vl
from moeserve.visualserver.shapes.gemma3 import Gemma3Shape
from moeserve.visualserver.shapes.gemma4 import Gemma4Shape
from moeserve.visualserver.shapes.glm4v import GlmShape
from moeserve.visualserver.shapes.kimi_k25 import KimiShape
from moeserve.visualserver.shapes.llama_4 import LlamaShape
from moeserve.visualserver.shapes.minimax_m3 import MiniMaxShape
from moeserve.visualserver.shapes.qwen3vl import Qwen3VlShape
from moeserve.visualserver.shapes.shape import VISION, check_tensors

MOST_TOKENS: Final = 16384

AnyTowerShape = Qwen3VlShape | Gemma3Shape | Gemma4Shape | KimiShape | GlmShape | MiniMaxShape | LlamaShape
_READERS: Final[Mapping[str, Callable[[TensorSource], AnyTowerShape]]] = {
    qwen3vl.PROJECTOR: qwen3vl.read_shape,
    gemma3.PROJECTOR: gemma3.read_shape,
    gemma4.PROJECTOR: gemma4.read_shape,
    kimi_k25.PROJECTOR: kimi_k25.read_shape,
    glm4v.PROJECTOR: glm4v.read_shape,
    minimax_m3.PROJECTOR: minimax_m3.read_shape,
    llama_4.PROJECTOR: llama_4.read_shape,
}


def open_tower(path: Path) -> tuple[TensorSource, AnyTowerShape]:
    """Opens an mmproj GGUF file or a model's folder, and returns it with the shape of its vision tower. Raises
    ModelError for a file without a tower, or with one that is not supported."""
    file: TensorSource = open_tower_folder(path) if path.is_dir() else open_gguf(path)
    meta = file.metadata
    if file.architecture != "clip":
        raise ModelError(
            path, f"its architecture is {file.architecture!r}, not 'clip'; name the model's mmproj file"
        )
    if not meta.require_bool("clip.has_vision_encoder", False):
        raise ModelError(
            path, "has no vision encoder (clip.has_vision_encoder); name the model's mmproj file"
        )
    # Files with several encoders name the projector of each.
    key = VISION + "projector_type"
    projector = meta.require_str(key if key in meta else "clip.projector_type")
    if projector not in _READERS:
        supported = ", ".join(map(repr, _READERS))
        raise SettingError(path, f"has the projector {projector!r}; supported are {supported}")
    shape = _READERS[projector](file)
    check_tensors(file, shape)
    return file, shape
