"""The properties that pages must share to be usable together: the model, how it is computed, and the layout of KV."""

from __future__ import annotations

from dataclasses import dataclass, field

# Raised by whoever changes what a page's bytes mean, or what the engine computes for the same weights.
KV_VERSION = 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Pages of equal fingerprints hold the same numbers for the same tokens."""

    kv_version: int
    model: str = field(compare=False)  # for people: its file's name
    model_hash: str
    architecture: str
    kv_dtype: str
    engine: str  # device, instruction set and weight layout, which round differently
    page_tokens: int
    page_bytes: int
