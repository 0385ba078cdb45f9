"""The settings of requests that `/set` and `--set` change: the chat API's sampling parameters and a few more fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from moeserve.errors import UserError
from moeserve.sampling.parameters import INT32_MAX, PARAMETERS, TYPES, Range

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # the API's reasoning_effort
UNSET: Final = "default"


class Setting(NamedTuple):
    read: Callable[[str], Any]  # raises ValueError
    allowed: str
    help: str


def _in_range(kind: type[int] | type[float], allowed: Range) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if value not in allowed:
            raise ValueError(text)
        return value

    return read


def _effort(text: str) -> str:
    if text not in EFFORTS:
        raise ValueError(text)
    return text


def _number(kind: type[int] | type[float], allowed: Range, text: str) -> Setting:
    shown = f"{allowed.low:g} or more" if allowed.high == INT32_MAX else str(allowed)
    return Setting(_in_range(kind, allowed), shown, text)


SETTINGS: Final[dict[str, Setting]] = {
    **{
        name: _number(TYPES[name], parameter.range_in("openai"), parameter.help)
        for name, parameter in PARAMETERS.items()
        if "openai" in parameter.apis
    },
    "seed": _number(int, Range(0, INT32_MAX), "The same seed gives the same answer."),
    "max_tokens": _number(int, Range(1, INT32_MAX), "Most tokens of an answer, reasoning included."),
    "thinking_token_budget": _number(int, Range(0, INT32_MAX), "Most tokens of reasoning; 0: none."),
    "reasoning_effort": Setting(_effort, ", ".join(EFFORTS), "How much the model reasons."),
}


def read_setting(name: str, text: str) -> Any:
    """Returns the value of a setting; None for "default". Raises UserError for an unknown name, or a value that is not
    allowed."""
    setting = SETTINGS.get(name)
    if setting is None:
        raise UserError(f"there is no setting {name}, only {', '.join(SETTINGS)}")
    if text == UNSET:
        return None
    try:
        return setting.read(text)
    except ValueError:
        raise UserError(f"{name}: must be {setting.allowed}, or {UNSET}, not {text!r}") from None


def read_assignment(text: str) -> tuple[str, Any]:
    """Returns the name and the converted value of NAME=VALUE, the form of --set. Raises UserError for a text of another
    form, an unknown name, or a value that is not allowed."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--set: must be NAME=VALUE, not {text!r}")
    return name.strip(), read_setting(name.strip(), value.strip())
