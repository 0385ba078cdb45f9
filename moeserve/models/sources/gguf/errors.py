"""The one error that opening or reading a GGUF file raises."""

from __future__ import annotations

from moeserve.models.errors import ModelError


class GGUFError(ModelError):
    """A GGUF file that cannot be served."""
