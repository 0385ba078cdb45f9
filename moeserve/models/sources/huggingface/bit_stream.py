"""Codes of a few bits that follow one another as a stream of bits, lowest first, and may cross bytes and words."""

from __future__ import annotations

from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def unpacked_bits(octets: Bytes, bits: int) -> Bytes:
    """Returns the codes of uint8 [..., n * bits / 8], one in each byte: [..., n]. n is a multiple of 8."""
    each = np.unpackbits(octets, axis=-1, bitorder="little")
    each = each.reshape(*octets.shape[:-1], -1, bits)
    codes: Bytes = each[..., 0].copy()
    for place in range(1, bits):
        codes |= each[..., place] << np.uint8(place)
    return codes


def packed_bits(codes: Bytes, bits: int) -> Bytes:
    """Returns the packed words: the inverse of `unpacked_bits`."""
    each = codes[..., None] >> np.arange(bits, dtype=np.uint8) & np.uint8(1)
    return np.packbits(each.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
