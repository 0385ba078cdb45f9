"""The sampling parameters that are numbers: a field of SamplerSettings declares one, with all that is known of it.

`docs/development/adding-a-sampling-parameter.md` describes the other changes for a new parameter: those in the
samplers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, NamedTuple, get_type_hints

import msgspec

Api = Literal["openai", "responses", "anthropic", "lightllm", "llama_server", "ollama"]
Column = Literal["float32", "float64", "int32"]
# In the order in which they run unless a request asks for another.
Sampler = Literal[
    "penalties", "dry", "temperature", "top_n_sigma", "top_k", "typical_p", "min_p", "top_p", "xtc"
]

INT32_MAX: Final = (1 << 31) - 1


class Range(NamedTuple):
    low: float
    high: float
    without_low: bool = False  # `low` itself is outside

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        return (self.low < value if self.without_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'above ' if self.without_low else ''}{self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter's properties; its name, type and default are those of the field that declares it. A value below
    `least` means `least`, and one above `most` means `most`: APIs write "off" as -1, too."""

    help: str  # one line, for the APIs' documents
    range: Range  # of an API's values
    column: Column  # the type that the device has it in
    sampler: Sampler  # what reads it
    apis: tuple[Api, ...]
    names: Mapping[Api, str] = field(default_factory=dict)  # where an API's name is another
    ranges: Mapping[Api, Range] = field(default_factory=dict)  # where an API's range is another
    defaults: Mapping[Api, float] = field(default_factory=dict)  # where an API's default is another
    notes: Mapping[Api, str] = field(default_factory=dict)  # where an API's help is another
    least: float | None = None
    most: float | None = None
    idle: tuple[
        float, ...
    ] = ()  # values beside the default that ask nothing of a beam search, which does not sample
    gguf: str = ""  # its key in a GGUF file is general.sampling.GGUF
    detail_of: str = ""  # the parameter without which it changes nothing

    def name_in(self, api: Api, name: str) -> str:
        return self.names.get(api, name)

    def bounded(self, value: float) -> float:
        if self.least is not None:
            value = max(value, type(value)(self.least))
        return value if self.most is None else min(value, type(value)(self.most))

    def range_in(self, api: Api) -> Range:
        return self.ranges.get(api, self.range)


_ALL: Final = ("openai", "responses", "anthropic", "lightllm", "llama_server", "ollama")
_LOCAL: Final = ("openai", "llama_server")  # of the servers of open models
_PENALISING: Final = ("openai", "lightllm", "llama_server", "ollama")
_NOT_0: Final = Range(0, 1, without_low=True)
_SHARE: Final = Range(0, 1)
_SIGNED: Final = Range(-2, 2)
_POSITIVE: Final = Range(0, 2)
_OFF_BELOW: Final = Range(-1, INT32_MAX)
# llama.cpp and Ollama accept any number, and clamp it to the usual range.
_ANY: Final = Range(-1000, 1000)
_FREE: Final[Mapping[Api, Range]] = {"llama_server": _ANY, "ollama": _ANY}
_REPEAT: Final[Mapping[Api, str]] = {"llama_server": "repeat_penalty", "ollama": "repeat_penalty"}


class SamplerSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings by which a token is chosen from logits. httpserver validates the ranges; the worker relies on
    them."""

    temperature: Annotated[
        float,
        Parameter(
            "Divides the logits: lower values make likely tokens likelier. 0 always takes the most likely token "
            "(greedy).",
            Range(0, 2),
            "float32",
            "temperature",
            _ALL,
            ranges={
                "anthropic": _SHARE,
                "lightllm": Range(0, 2, without_low=True),
                **_FREE,
            },
            least=0,
            idle=(0,),
            gguf="temp",
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter(
            "Keep only this many of the most likely tokens. 0 and -1 switch it off.",
            _OFF_BELOW,
            "int32",
            "top_k",
            _ALL,
            ranges={"anthropic": Range(0, INT32_MAX)},
            notes={"anthropic": "0 switches it off.", "lightllm": "-1 switches it off."},
            defaults={"lightllm": -1},
            least=0,
            idle=(-1,),
            gguf="top_k",
        ),
    ] = 0
    top_p: Annotated[
        float,
        Parameter(
            "Keep only the most likely tokens that have this probability together.",
            _NOT_0,
            "float64",
            "top_p",
            _ALL,
            ranges=_FREE,
            least=0,
            most=1,
            gguf="top_p",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Parameter(
            "Keep only tokens that have at least this share of the most likely token's probability.",
            _SHARE,
            "float64",
            "min_p",
            ("openai", "llama_server", "ollama"),
            ranges=_FREE,
            least=0,
            most=1,
            gguf="min_p",
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        Parameter(
            "Subtracted from the logits of the answer's tokens so far.",
            _SIGNED,
            "float32",
            "penalties",
            _PENALISING,
            ranges={"lightllm": _POSITIVE, **_FREE},
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            "Subtracted from the logits of the answer's tokens so far, once for each time that the answer has the "
            "token.",
            _SIGNED,
            "float32",
            "penalties",
            _PENALISING,
            ranges={"lightllm": _POSITIVE, **_FREE},
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Parameter(
            "Makes tokens of the prompt and the answer less likely above 1, and more likely below: divides their "
            "positive logits by this number, and multiplies their negative logits by it.",
            Range(0.01, 100),
            "float32",
            "penalties",
            _PENALISING,
            names=_REPEAT,
            ranges={"lightllm": Range(1, 100)},
            gguf="penalty_repeat",
        ),
    ] = 1.0
    dry_multiplier: Annotated[
        float,
        Parameter(
            "The penalty for a token that would continue a repetition; 0 switches DRY off.",
            Range(0, 100),
            "float32",
            "dry",
            _LOCAL,
        ),
    ] = 0.0
    dry_base: Annotated[
        float,
        Parameter(
            "The penalty grows by this factor with every token of the repetition.",
            Range(1, 100),
            "float32",
            "dry",
            _LOCAL,
            detail_of="dry_multiplier",
        ),
    ] = 1.75
    dry_allowed_length: Annotated[
        int,
        Parameter(
            "Length in tokens from which on a repetition is penalised: at this length the penalty is dry_multiplier.",
            Range(0, INT32_MAX),
            "int32",
            "dry",
            _LOCAL,
            detail_of="dry_multiplier",
        ),
    ] = 2
    dry_penalty_last_n: Annotated[
        int,
        Parameter(
            "Number of last tokens in which repetitions are looked for; -1: all, 0: none.",
            _OFF_BELOW,
            "int32",
            "dry",
            _LOCAL,
            detail_of="dry_multiplier",
        ),
    ] = -1
    top_n_sigma: Annotated[
        float,
        Parameter(
            "Keep only tokens whose logit is within this many standard deviations of the largest. 0 and -1 switch it "
            "off.",
            Range(-1, 1000),
            "float64",
            "top_n_sigma",
            _LOCAL,
            least=0,
            idle=(-1,),
        ),
    ] = 0.0
    typical_p: Annotated[
        float,
        Parameter(
            "Keep the tokens whose surprise is nearest to the expected one, until they have this probability together.",
            _NOT_0,
            "float64",
            "typical_p",
            ("openai", "llama_server", "ollama"),
            ranges=_FREE,
            least=0,
            most=1,
        ),
    ] = 1.0
    xtc_probability: Annotated[
        float,
        Parameter(
            "Probability of applying XTC to a token: it leaves out all tokens with at least the probability "
            "xtc_threshold, except the least likely of them.",
            _SHARE,
            "float64",
            "xtc",
            _LOCAL,
            gguf="xtc_probability",
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        Parameter(
            "The smallest probability of tokens that XTC may leave out; above 0.5 it leaves none out.",
            _SHARE,
            "float64",
            "xtc",
            _LOCAL,
            gguf="xtc_threshold",
            detail_of="xtc_probability",
        ),
    ] = 0.1


def _declared() -> Mapping[str, Parameter]:
    hints = get_type_hints(SamplerSettings, include_extras=True)
    return {name: hints[name].__metadata__[0] for name in SamplerSettings.__struct_fields__}


PARAMETERS: Final = _declared()  # by name
TYPES: Final[Mapping[str, type[int] | type[float]]] = get_type_hints(SamplerSettings)
DEFAULTS: Final = SamplerSettings()


def settings_of(settings: SamplerSettings) -> dict[str, Any]:
    """Returns the parameters by name. `settings` may be a message with other fields as well."""
    return {name: getattr(settings, name) for name in PARAMETERS}
