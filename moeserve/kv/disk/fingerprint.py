"""The properties that decide whether one server may use another's pages: the model, the engine and the KV layout."""

from __future__ import annotations

from dataclasses import dataclass, field

# Raise it with each change of the pages' format, or of the numbers that the engine computes from the same weights.
KV_VERSION = 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies compatible pages: pages with equal fingerprints hold the same numbers for the same tokens."""

    kv_version: int
    model: str = field(compare=False)  # file name of the model; for people only
    model_hash: str
    architecture: str
    kv_dtype: str
    engine: str  # device, instruction set and weight layout: they affect rounding
    page_tokens: int
    page_bytes: int
