"""A client's effort reaches a template in the template's words, whichever API it comes by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.support.chats.scripted_answers import prompt_of
from tests.support.models.gguf_bytes import TOKEN_TYPES, TOKENS, gguf_bytes, model_metadata, model_tensors
from tests.support.servers.http_harness import NAME, HttpServer, http_server, say

_USER_DEFINED: Final = 4  # the kind of a token that is part of texts
_GLM: Final = (
    "{%- set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort in "
    "['low', 'high'] else 'max' -%}Effort: {{ effort | capitalize }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    "{{ '<think>' if enable_thinking is undefined or enable_thinking else '<think></think>' }}"
)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    model = tmp_path_factory.mktemp("efforts") / "model.gguf"
    metadata = model_metadata(
        tokenizer__ggml__tokens=[*TOKENS, "</think>"],
        tokenizer__ggml__token_type=[*TOKEN_TYPES, _USER_DEFINED],
        tokenizer__chat_template=_GLM,
    )
    model.write_bytes(gguf_bytes(metadata, model_tensors()))
    with http_server(model=str(model), context=2048) as running:
        running.answer = say("Hi")
        yield running


_HI: Final = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "asked", "effort"),
    [
        ("/v1/chat/completions", {"messages": _HI}, "Max"),
        ("/v1/chat/completions", {"messages": _HI, "reasoning_effort": "low"}, "Low"),
        ("/v1/chat/completions", {"messages": _HI, "reasoning": {"effort": "medium"}}, "High"),
        (
            "/v1/chat/completions",
            {
                "messages": _HI,
                "reasoning_effort": "low",
                "chat_template_kwargs": {"reasoning_effort": "high"},
            },
            "High",
        ),
        ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "low"}}, "Low"),
        ("/v1/messages", {"messages": _HI, "max_tokens": 9}, "Low"),
        (
            "/v1/messages",
            {
                "messages": _HI,
                "max_tokens": 9,
                "thinking": {"type": "adaptive"},
                "output_config": {"effort": "high"},
            },
            "High",
        ),
        ("/api/chat", {"messages": _HI, "stream": False, "think": "low"}, "Low"),
        ("/api/chat", {"messages": _HI, "stream": False, "think": True}, "Max"),
    ],
)
def test_each_api_passes_the_effort(glm: HttpServer, path: str, asked: dict[str, Any], effort: str) -> None:
    glm.requests.clear()
    response = glm.post(path, {"model": NAME} | asked)
    assert response.status_code == 200, response.text
    assert prompt_of(glm).startswith(f"Effort: {effort}<")
