"""GGUF files: open, check, map. Imports neither torch nor anything else of ours."""

from .errors import GGUFError
from .file import GGUFFile, open_gguf
from .header import TensorInfo
from .metadata import Metadata, StringArray

__all__ = ["GGUFError", "GGUFFile", "Metadata", "StringArray", "TensorInfo", "open_gguf"]
