"""Models by name: from a repository of the Hugging Face Hub, or of what speaks its API, into its cache."""

from .errors import HubError
from .names import HubName, parse_name

__all__ = ["HubError", "HubName", "parse_name"]
