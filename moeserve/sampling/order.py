"""The order in which the samplers run: ours, or one that a request asks for as llama-server's clients do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, get_args

from moeserve.sampling.parameters import DEFAULTS, PARAMETERS, Sampler, SamplerSettings

# Of vLLM, with llama.cpp's samplers where vLLM has none.
DEFAULT_ORDER: Final[tuple[Sampler, ...]] = get_args(Sampler)
EDITS: Final = ("penalties", "dry")  # they change logits, and come before whatever leaves tokens out

# An order as devices get it: four bits per sampler, the first in the lowest bits, numbered as in sampling.h and
# chain.py.
CODES: Final[Mapping[str, int]] = {name: i + 1 for i, name in enumerate(DEFAULT_ORDER[len(EDITS) :])}
_PLAIN: Final = ("temperature", "top_k", "min_p", "top_p")
# The settings that make a sampler do something: its own that are no detail of another.
_SWITCHES: Final[Mapping[str, Callable[[SamplerSettings], Any]]] = {
    sampler: attrgetter(
        *(name for name, of in PARAMETERS.items() if of.sampler == sampler and not of.detail_of)
    )
    for sampler in DEFAULT_ORDER
}
_IDLE: Final = {sampler: switches(DEFAULTS) for sampler, switches in _SWITCHES.items()}

_LETTERS: Final[Mapping[str, str]] = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typical_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}
_NAMES: Final[Mapping[str, str]] = {
    **{name: name for name in DEFAULT_ORDER},
    "typ_p": "typical_p",
    "typical": "typical_p",
    "typ-p": "typical_p",
    "typical-p": "typical_p",
    "typ": "typical_p",
    "top-k": "top_k",
    "top-p": "top_p",
    "nucleus": "top_p",
    "min-p": "min_p",
    "top-n-sigma": "top_n_sigma",
    "temp": "temperature",
}


# llama-server's samplers that have no effect here. Their own fields are refused unless they have no effect either;
# `infill` has no fields, and editors name it in their orders.
_OFF: Final = frozenset({"tfs_z", "adaptive_p", "a", "infill", "i"})


def read_order(asked: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the order of samplers, as names from DEFAULT_ORDER. asked: llama-server's names of samplers, or a text of
    their letters. A client may name a sampler once in each of two spellings; the first one counts. Raises ValueError,
    which names the fault, for an order that is not supported."""
    table, kind = (_LETTERS, "letter") if isinstance(asked, str) else (_NAMES, "sampler")
    wanted = [one for one in asked if one not in _OFF]
    unknown = [one for one in wanted if one not in table]
    if unknown:
        raise ValueError(f"there is no {kind} {unknown[0][:40]!r}; there are {', '.join(table)}")
    if len(set(wanted)) < len(wanted):
        raise ValueError("each sampler may be named only once")
    order = tuple(dict.fromkeys(table[one] for one in wanted))
    edits = [name for name in order if name in EDITS]
    if tuple(edits) != order[: len(edits)] or edits == list(reversed(EDITS)):
        raise ValueError(
            "penalties must come first, then dry: they change logits before other samplers drop tokens; move them"
        )
    return order


def heeded(settings: SamplerSettings, order: Sequence[str]) -> dict[str, Any]:
    """Returns the settings by name. Settings of samplers that the order leaves out have their defaults."""
    kept = order or DEFAULT_ORDER
    return {
        name: getattr(settings if of.sampler in kept else DEFAULTS, name) for name, of in PARAMETERS.items()
    }


def order_code(settings: SamplerSettings, order: Sequence[str] = ()) -> int:
    """Returns the samplers that have an effect, packed in their order, for a device that gets `heeded` settings. 0: at
    most temperature, top_k, min_p and top_p, in this order."""
    acting = [name for name in order or DEFAULT_ORDER if name in CODES and _acts(name, settings)]
    if acting == [name for name in _PLAIN if _acts(name, settings)]:
        return 0
    return sum(CODES[name] << 4 * i for i, name in enumerate(acting))


def _acts(sampler: str, settings: SamplerSettings) -> bool:
    """Returns whether the sampler has an effect with these settings."""
    return bool(_SWITCHES[sampler](settings) != _IDLE[sampler])
