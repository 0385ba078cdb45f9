"""Models in Hugging Face's layout: config.json, tokenizer.json, *.safetensors. Knows neither torch nor transformers."""

from .folder import HuggingFaceFolder, is_hugging_face_folder, open_mapped_folder, read_config
from .tower_folder import has_tower, open_tower_folder

__all__ = [
    "HuggingFaceFolder",
    "has_tower",
    "is_hugging_face_folder",
    "open_mapped_folder",
    "open_tower_folder",
    "read_config",
]
