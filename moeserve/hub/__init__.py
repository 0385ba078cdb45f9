"""Models by name: downloads them from a repository of the Hugging Face Hub (or of a server with the same API) into the
Hub's cache."""

from .errors import HubError
from .names import HubName, name_of, parse_name

__all__ = ["HubError", "HubName", "name_of", "parse_name"]
