"""The fields of beam search, under vLLM's names if it has them, else under transformers'."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from moeserve.httpserver.transport.request_model import RequestModel, asks_nothing
from moeserve.messages.beams import MAX_CANDIDATES, BeamParams
from moeserve.sampling.parameters import DEFAULTS, PARAMETERS

MAX_LENGTH_PENALTY: Final = 8.0

# Fields that cannot be combined with beams: their neutral values, and what to use instead.
_KNOWN_AT_THE_END = "beams are known at the end only: leave out stream"
_NOT_SAMPLED = "beam search does not sample: leave it out"
_RAW_SCORES = "beams are scored by the model's own log-probabilities: leave it out"
_NOT_WITH_BEAMS: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "stream": ((False,), _KNOWN_AT_THE_END),
    **{
        name: (
            (getattr(DEFAULTS, name), *of.idle),
            _RAW_SCORES if of.sampler in ("penalties", "dry") else _NOT_SAMPLED,
        )
        for name, of in PARAMETERS.items()
        if not of.detail_of
    },
    "logit_bias": (({},), _RAW_SCORES),
    "bad_words": (([],), _RAW_SCORES),
    "allowed_token_ids": (([],), _RAW_SCORES),
    "stop": (([],), "use stop_token_ids, which end a beam"),
}
_ONLY_WITH_BEAMS: Final = ("beam_width", "num_beam_groups", "diversity_penalty")


class BeamFields(RequestModel):
    use_beam_search: Annotated[
        bool, Field(description="The most likely answers of a beam search, best first (vLLM).")
    ] = False
    beam_width: Annotated[
        int | None, Field(ge=1, le=MAX_CANDIDATES, description="Number of beams, at least n (default: n).")
    ] = None
    length_penalty: Annotated[
        float,
        Field(
            ge=-MAX_LENGTH_PENALTY,
            le=MAX_LENGTH_PENALTY,
            description="A beam's log-probability is divided by its length to this power.",
        ),
    ] = 1.0
    early_stopping: Annotated[
        bool | Literal["never"],
        Field(
            description="When a search that has as many answers as beams ends. True: at once. False: as soon as no "
            'beam scores better than these answers now. "never": as soon as no beam could still become '
            "better."
        ),
    ] = False
    num_beam_groups: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_CANDIDATES,
            description="Number of groups of beams; groups avoid each other's tokens "
            "(see diversity_penalty).",
        ),
    ] = 1
    diversity_penalty: Annotated[
        float,
        Field(
            ge=0,
            le=100,
            description="Subtracted from a token's log-probability for each beam of an earlier group that took it.",
        ),
    ] = 0.0

    def beam_params(self, n: int) -> BeamParams | None:
        """Returns the beam search that the fields ask for, with `n` answers; None if they ask for none. Its
        `key` and `choice` are placeholders, filled in for each request. Raises PydanticCustomError if the fields
        contradict each other."""
        if not self.use_beam_search:
            for name in _ONLY_WITH_BEAMS:
                if name in self.model_fields_set:
                    raise PydanticCustomError(name, "is only allowed with use_beam_search true")
            return None
        for name, (neutral, remedy) in _NOT_WITH_BEAMS.items():
            if not asks_nothing(getattr(self, name), neutral):
                text = "cannot be combined with use_beam_search; {remedy}"
                raise PydanticCustomError(name, text, {"remedy": remedy})
        width = n if self.beam_width is None else self.beam_width
        if width < n:
            message = "must be at least n, {n}, got {width}"
            raise PydanticCustomError("beam_width", message, {"n": n, "width": width})
        if width % self.num_beam_groups:
            message = "must divide the {width} beams into groups of equal size"
            raise PydanticCustomError("num_beam_groups", message, {"width": width})
        if self.diversity_penalty and self.num_beam_groups == 1:
            raise PydanticCustomError("diversity_penalty", "needs num_beam_groups of 2 or more")
        return BeamParams(
            key=0,
            choice=0,
            num_choices=n,
            width=width,
            groups=self.num_beam_groups,
            length_penalty=self.length_penalty,
            diversity_penalty=self.diversity_penalty,
            early_stopping=self.early_stopping,
        )
