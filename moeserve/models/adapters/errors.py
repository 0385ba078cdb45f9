"""The one error that reading an adapter raises."""

from __future__ import annotations

from typing import Final

from moeserve.models.errors import ModelError

OTHER: Final = "choose a LoRA adapter that was trained for this model"  # the remedy where nothing else helps


class AdapterError(ModelError):
    """An adapter that cannot be served: names the file, the tensor or setting, the cause and the remedy."""
