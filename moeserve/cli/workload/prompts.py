"""The token ids of a session's prompts, the same wherever the workload runs.

Ids lie in 300 .. 1499, which are ordinary pieces of text in every known vocabulary: byte-level and SentencePiece
vocabularies begin with at most 259 bytes and control tokens, and have their special tokens at the end; the packaged
model's has 1,536 tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moeserve.cli.workload.trace import Workload

Int32s = npt.NDArray[np.int32]

FIRST_ID, END_ID = 300, 1500
_PREFIX, _TURN = 0, 1  # the purpose of a stream of random numbers


def prefix_ids(workload: Workload, session: int, count: int) -> Int32s:
    """Returns the first `count` tokens of the prefix that a group's sessions share: int32 [count]."""
    return _random_ids((workload.seed, _PREFIX, workload.sessions[session].prefix), count)


def turn_ids(workload: Workload, session: int, turn: int, count: int) -> Int32s:
    """Returns the first `count` new tokens of a turn: int32 [count]."""
    return _random_ids((workload.seed, _TURN, session, turn), count)


def _random_ids(stream: tuple[int, ...], count: int) -> Int32s:
    return np.random.default_rng(stream).integers(FIRST_ID, END_ID, count, dtype=np.int32)


class TokenHistory:
    """The growing prompts of one session: prefix, a turn's new tokens, its answer, the next turn's new tokens, and so
    on."""

    def __init__(self, workload: Workload, session: int) -> None:
        """`session`: its index in the workload."""
        self._workload = workload
        self._session = session
        self._tokens = prefix_ids(workload, session, workload.sessions[session].prefix_len)

    def prompt(self, turn: int) -> Int32s:
        """Returns the whole prompt of a turn, int32 [n]. Call it for the turns in order."""
        wanted = self._workload.sessions[self._session].turns[turn]
        if wanted.prompt is not None:
            self._tokens = np.frombuffer(wanted.prompt, np.int32)
        else:
            new = turn_ids(self._workload, self._session, turn, wanted.input_len)
            self._tokens = np.concatenate([self._tokens, new])
        return self._tokens

    def answered(self, token_ids: Int32s) -> None:
        """Stores an answer, int32 [n], which the next prompt repeats."""
        self._tokens = np.concatenate([self._tokens, token_ids])
