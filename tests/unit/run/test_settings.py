"""Settings of a chat: the API's names, types and ranges."""

from __future__ import annotations

from typing import get_args

import pytest

from moeserve.cli.run.settings import EFFORTS, SETTINGS, read_assignment, read_setting
from moeserve.errors import UserError
from moeserve.httpserver.generation.request.thinking import Effort
from moeserve.httpserver.openai.chat_body import ChatCompletionRequest


def test_every_setting_is_a_field_of_the_api() -> None:
    assert SETTINGS.keys() <= ChatCompletionRequest.model_fields.keys()
    assert get_args(Effort) == EFFORTS
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"} <= SETTINGS.keys()


def test_values_have_their_types() -> None:
    assert read_setting("temperature", "0.2") == 0.2
    assert read_setting("top_k", "40") == 40
    assert read_setting("reasoning_effort", "none") == "none"
    assert read_setting("temperature", "default") is None
    assert read_assignment("top_p = 0.9") == ("top_p", 0.9)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("temperature", "hot", "temperature: must be 0 to 2, or default, not 'hot'"),
        ("temperature", "2.1", "must be 0 to 2"),
        ("temperature", "nan", "must be 0 to 2"),
        ("top_k", "1.5", "top_k: must be -1 or more"),
        ("max_tokens", "0", "max_tokens: must be 1 or more"),
        ("reasoning_effort", "much", "must be none, minimal, low"),
        ("tempreature", "1", "there is no setting tempreature, only temperature, top_k"),
    ],
)
def test_values_that_are_refused(name: str, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_setting(name, text)


def test_an_assignment_needs_its_sign() -> None:
    with pytest.raises(UserError, match="must be NAME=VALUE, not 'temperature'"):
        read_assignment("temperature")


def test_every_setting_is_accepted_by_the_api() -> None:
    """At the least and at the largest value that is read."""
    for name, setting in SETTINGS.items():
        for text in ("0", "1", "0.5", "2", *EFFORTS):
            try:
                value = setting.read(text)
            except ValueError:
                continue
            ChatCompletionRequest.model_validate(
                {"messages": [{"role": "user", "content": "x"}], name: value}
            )
