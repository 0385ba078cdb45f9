"""GGUF files: opens, checks and maps them. Imports neither torch nor other rooms of moeserve."""

from .errors import GGUFError
from .file import GGUFFile, open_gguf
from .header import TensorInfo
from .metadata import Metadata, StringArray

__all__ = ["GGUFError", "GGUFFile", "Metadata", "StringArray", "TensorInfo", "open_gguf"]
