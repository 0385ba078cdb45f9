"""Models in Hugging Face's layout: config.json, tokenizer.json, *.safetensors. Knows neither torch nor transformers."""

from .folder import HuggingFaceFolder, is_hugging_face_folder, open_mapped_folder, read_config

__all__ = ["HuggingFaceFolder", "is_hugging_face_folder", "open_mapped_folder", "read_config"]
