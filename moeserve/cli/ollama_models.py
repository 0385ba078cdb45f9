"""Finds the GGUF files of models that Ollama has downloaded, for suggestions.

Ollama keeps a manifest for each name, and contents under their hashes: `manifests/registry.ollama.ai/library/NAME/TAG`
is JSON whose layer of type `application/vnd.ollama.image.model` is the GGUF file `blobs/sha256-...`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

_MODEL: Final = "application/vnd.ollama.image.model"
_SERVICE: Final = "/usr/share/ollama/.ollama/models"  # of the systemd unit that Ollama's installer makes
_MOST_BYTES: Final = 1 << 20  # of a manifest


def file_of(name: str) -> Path | None:
    """Returns the file of the model that Ollama calls `name`, with or without a tag; None if there is none."""
    base, _, tag = name.partition(":")
    for folder in (os.environ.get("OLLAMA_MODELS"), "~/.ollama/models", _SERVICE):
        if folder:
            models = Path(os.path.expanduser(folder))  # unlike Path's, it does not fail without a home
            digest = _digest(models / "manifests/registry.ollama.ai/library" / base / (tag or "latest"))
            file = models / "blobs" / digest.replace(":", "-")
            if digest and os.path.exists(file):
                return file
    return None


def is_folder(folder: Path) -> bool:
    """Returns whether the folder is Ollama's, or the one in it with the models' contents."""
    models = folder.parent if folder.name == "blobs" else folder
    return os.path.isdir(models / "blobs") and os.path.isdir(models / "manifests")


def _digest(manifest: Path) -> str:
    """Returns the hash of the manifest's model, "sha256:" before it; empty if the file says none or cannot be read."""
    try:
        with manifest.open("rb") as opened:
            layers = json.loads(opened.read(_MOST_BYTES))["layers"]
        return next(str(one["digest"]) for one in layers if one["mediaType"] == _MODEL)
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return ""
