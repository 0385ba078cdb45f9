"""Gemma 4's RoPE: layers with and without a window have different frequencies. In layers without a window only a
fraction of each head's pairs rotates, with frequencies spread as if all pairs rotated ("proportional")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.quantization.table import F32

from .made_tensor import MadeTensor, bytes_of

SLIDING, FULL = "sliding_attention", "full_attention"  # values of `layer_types`
NOT_ROTATED = 1e30  # llama.cpp's converter divides the frequency of an unrotated pair by this
_ROPES: Mapping[str, Mapping[str, Any]] = {  # transformers' defaults, without `rope_parameters`
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns the settings of both kinds of layers. Raises ModelError for unsupported settings."""
    ropes = config.get("rope_parameters") or _ROPES
    if not isinstance(ropes, dict) or not all(isinstance(ropes.get(kind), dict) for kind in _ROPES):
        raise SettingError(path, f"'rope_parameters' is {ropes!r}; an object for each of {' and '.join(_ROPES)}"
                               " is expected")  # fmt: skip
    for kind, supported in ((SLIDING, ("default",)), (FULL, ("proportional", "default"))):
        given = {key: value for key, value in ropes[kind].items() if value is not None}
        found = given.get("rope_type", "default")
        if found not in supported:
            raise SettingError(
                path, f"rope_type {found!r} of {kind} is not supported; {' and '.join(supported)} is"
            )
        unknown = given.keys() - {"rope_type", "rope_theta", "partial_rotary_factor"}
        if unknown - {"factor"} or given.get("factor", 1) != 1:
            raise SettingError(path, f"{min(unknown)!r} of rope_type {found!r} is not supported")
        if "rope_theta" not in given:
            raise SettingError(path, f"'rope_theta' of {kind} is missing")
    full = ropes[FULL]
    # With the default type, transformers rotates the whole head and ignores the share.
    share = full.get("partial_rotary_factor", 1.0) if full.get("rope_type") == "proportional" else 1.0
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise SettingError(path, f"'partial_rotary_factor' is {share!r}; a number up to 1 is expected")
    return {
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": ropes[SLIDING]["rope_theta"],
        n.ROTATED_SHARE: float(share),
    }


def rope_factors(metadata: Metadata) -> Iterator[tuple[str, MadeTensor]]:
    """Yields a GGUF tensor, float32 [head width / 2], of divisors of the rotary frequencies in layers without a window:
    1 for the first pairs, and NOT_ROTATED for the others, so large that these do not rotate."""
    architecture = metadata.require_str("general.architecture")
    dim = metadata.require_int(f"{architecture}.attention.key_length", 2, 1024)
    share = metadata.require_float(f"{architecture}.{n.ROTATED_SHARE}", 0.0, 1.0)
    factors = np.full(dim // 2, NOT_ROTATED, np.float32)
    factors[: int(share * dim // 2)] = 1.0
    yield n.ROPE_FREQS, MadeTensor(factors.shape, F32, (), lambda: bytes_of(factors))
