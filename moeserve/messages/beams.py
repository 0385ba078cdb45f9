"""A request's parameters of a beam search: the part that messages share."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

EarlyStopping = bool | Literal["never"]

# The end tokens and the beams of a search together: as many top tokens as the worker gives of a row.
MAX_CANDIDATES: Final = 20


class BeamParams(msgspec.Struct, frozen=True, array_like=True):
    """One of the answers of a beam search, which are requests of their own with one `key`: this one gets the answer
    that is `choice` places behind the best of `num_choices`. The router begins when it has all of them.

    A search keeps `width` beams, the most likely unfinished answers, in `groups` of equal size that are searched one
    after the other; `diversity_penalty` is taken from the score of a token for each beam of an earlier group that takes
    it in the same step. An answer's score is the sum of its tokens' log-probabilities, its end token's included, over
    their number to the power of `length_penalty`. A group ends when it has as many answers as beams and, for
    `early_stopping` true, at once; for false, when the best beam would not come among them if it ended now; for
    "never", when it could not even at max_tokens, if that makes scores larger.
    """

    key: int  # unique while the server runs
    choice: int
    num_choices: int
    width: int
    groups: int = 1
    length_penalty: float = 1.0
    diversity_penalty: float = 0.0
    early_stopping: EarlyStopping = False
