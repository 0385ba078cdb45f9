"""Field types that the request bodies of several APIs share."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

INT64_MAX: Final = (1 << 63) - 1
INT32_MAX: Final = (1 << 31) - 1
MAX_CHOICES: Final = 128
MAX_MESSAGES: Final = 16384  # the most messages of a conversation
MAX_STOPS: Final = 16
MAX_MANY_STOPS: Final = 128
MAX_TOP_LOGPROBS: Final = 20


def one_or_many(value: Any) -> Any:
    """Makes a list of a single string."""
    return [value] if isinstance(value, str) else value


def _stop_strings(value: Any) -> Any:
    """Returns a list of stop strings, also for a single one. Drops empty strings, which web forms send for "none"."""
    several = one_or_many(value)
    if not isinstance(several, list) or len(several) > MAX_MANY_STOPS:
        return several
    return [one for one in several if one != ""]


StopString = Annotated[str, Field(min_length=1, max_length=1024)]
StopStrings = Annotated[
    list[StopString],
    BeforeValidator(_stop_strings, json_schema_input_type=str | list[str]),
    Field(
        max_length=MAX_STOPS,
        description="At most 16 strings that end the text; not part of it. Empty ones are dropped.",
    ),
]
# A larger bound, for APIs that set none of their own: their clients send every speaker's name as a stop string.
ManyStopStrings = Annotated[
    list[StopString],
    BeforeValidator(_stop_strings, json_schema_input_type=str | list[str]),
    Field(
        max_length=MAX_MANY_STOPS,
        description="At most 128 strings that end the text; not part of it. Empty ones are dropped.",
    ),
]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
ModelName = Annotated[str, Field(max_length=512, description="Name of the model; may be left out.")]
CacheSalt = Annotated[
    str, Field(max_length=256, description="Only requests with the same salt share cached prefixes.")
]
