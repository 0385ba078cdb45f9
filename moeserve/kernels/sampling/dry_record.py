"""The host's writes to a slot's DRY record; `dry.py` describes its format."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moeserve.kernels.sampling.cpu import runs_by_lag

Int32s = npt.NDArray[np.int32]
HEADER = 4  # words before the tokens; dry.py's


def dry_record(text: Int32s, room: int, breakers: Int32s, vocab: int) -> Int32s:
    """Returns a record of `text` with space for `room` tokens. breakers: token sequences, each terminated by -1."""
    text = np.ascontiguousarray(text, np.int32)
    sequences = _split(breakers)
    mask = np.zeros((vocab + 31) // 32 * 32, np.uint8)
    mask[[sequence[0] for sequence in sequences if len(sequence) == 1]] = 1
    longer = [token for sequence in sequences if len(sequence) > 1 for token in (*sequence, -1)]
    tokens, runs = np.zeros(room, np.int32), np.zeros(room, np.int32)
    tokens[: len(text)] = text
    runs[: len(text)] = runs_by_lag(text)
    header = np.array([len(text), len(text), _unbroken(text, sequences), 0], np.int32)
    bits = np.packbits(mask, bitorder="little").view(np.int32)
    return np.concatenate([header, tokens, runs, bits, np.array([*longer, -1], np.int32)])


def _split(breakers: Int32s) -> list[list[int]]:
    ends = np.flatnonzero(breakers < 0)
    return [part[part >= 0].tolist() for part in np.split(breakers, ends + 1) if (part >= 0).any()]


def _unbroken(text: Int32s, sequences: list[list[int]]) -> int:
    """Returns the number of tokens after the last breaker; the number of all tokens if there is no breaker."""
    last = 0
    for sequence in sequences:
        ends = np.ones(max(len(text) - len(sequence) + 1, 0), np.bool_)
        for i, token in enumerate(sequence):
            ends &= text[i : i + len(ends)] == token
        if ends.any():
            last = max(last, int(np.flatnonzero(ends)[-1]) + len(sequence))
    return len(text) - last
