"""The one error that reading an adapter raises."""

from __future__ import annotations

from moeserve.models.errors import ModelError


class AdapterError(ModelError):
    """An adapter that cannot be served: names the file, the tensor or setting, and the cause."""
