"""The parameters of a beam search in a request."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

EarlyStopping = bool | Literal["never"]

# The most end tokens plus beams of a search: the worker returns this many top tokens for a row.
MAX_CANDIDATES: Final = 20


class BeamParams(msgspec.Struct, frozen=True, array_like=True):
    """One answer of a beam search. Each answer is a request of its own; all have the same `key`. This request gets the
    answer of rank `choice` (0: the best) out of `num_choices`. The router begins when it has all of the requests.

    A search keeps `width` beams, the most likely unfinished answers, in `groups` of equal size that are searched one
    after the other; `diversity_penalty` is subtracted from a token's score for each beam of an earlier group that takes
    the token in the same step. An answer's score is the sum of its tokens' log-probabilities (end token included)
    divided by (number of tokens) ** `length_penalty`. A group can end once it has as many answers as beams. With
    `early_stopping` true it ends at once; with false, when the best beam, ended now, would not be among the best
    answers; with "never", when the best beam could not get there even at max_tokens.
    """

    key: int  # unique while the server runs
    choice: int
    num_choices: int
    width: int
    groups: int = 1
    length_penalty: float = 1.0
    diversity_penalty: float = 0.0
    early_stopping: EarlyStopping = False
