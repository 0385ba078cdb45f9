"""The amount of reasoning that a client asks for: effort words, token budgets and switches of the APIs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from pydantic_core import PydanticCustomError

from moeserve.httpserver.generation.request.fields import INT32_MAX

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Most reasoning tokens by effort; other efforts set no bound.
BUDGETS: Final[Mapping[str, int]] = {"none": 0, "minimal": 256, "low": 1024, "medium": 4096, "high": 16384}


@dataclass(frozen=True)
class ThinkingOptions:
    """The reasoning that a client asks for. is_enabled: None leaves it to the template. effort: the word that sets the
    budget; None if the client gave a number or nothing. param: the client's name of the budget, for messages."""

    is_enabled: bool | None = None
    budget: int | None = None  # tokens
    param: str = "thinking_token_budget"
    effort: Effort | None = None


def thinking_options(
    effort: Effort | None, budget: int | None, kwargs: Mapping[str, Any], param: str = "thinking_token_budget"
) -> ThinkingOptions:
    """Returns the reasoning options that `reasoning_effort`, a budget in tokens, and the template's own
    `enable_thinking` and `thinking_budget` (Qwen's) ask for together. A budget of 0 switches reasoning off. Raises
    PydanticCustomError if they disagree."""
    in_kwargs = kwargs.get("thinking_budget")
    if in_kwargs is not None and (type(in_kwargs) is not int or not 0 <= in_kwargs <= INT32_MAX):
        raise PydanticCustomError(
            "chat_template_kwargs", "thinking_budget must be an integer from 0 to 2147483647"
        )
    of_effort = None if effort is None else BUDGETS.get(effort)
    given = {"reasoning_effort": of_effort, param: budget, "chat_template_kwargs.thinking_budget": in_kwargs}
    named = {name: value for name, value in given.items() if value is not None}
    if len(set(named.values())) > 1:
        numbers = ", ".join(f"{name} ({value})" for name, value in named.items())
        raise PydanticCustomError(
            param,
            "these fields ask for different numbers of reasoning tokens: {numbers}; send one of them",
            {"numbers": numbers},
        )
    if not named:
        return ThinkingOptions(param=param, effort=effort)
    name, value = next(iter(named.items()))
    is_enabled = False if value == 0 else None
    if is_enabled is False and kwargs.get("enable_thinking") is True:
        raise PydanticCustomError(
            "chat_template_kwargs", "enable_thinking contradicts {name}; send one of them", {"name": name}
        )
    return ThinkingOptions(is_enabled, value, name, effort if len(named) == 1 else None)


def switched(options: ThinkingOptions, is_enabled: bool | None, param: str) -> ThinkingOptions:
    """Returns the options with the switch of the field `param`. Off wins over an effort or a budget, which say how much
    there would be. Raises PydanticCustomError for a switch that is on beside a budget of 0."""
    if is_enabled is None:
        return options
    if not is_enabled:
        return ThinkingOptions(is_enabled=False, budget=0, param=param, effort="none")
    if options.is_enabled is False:
        raise PydanticCustomError(param, "contradicts {name}", {"name": options.param})
    return replace(options, is_enabled=True)
