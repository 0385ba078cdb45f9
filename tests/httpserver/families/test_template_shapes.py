"""System messages reach the prompt of a template that shows only the first, whichever API they come by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.support.models.gguf_bytes import gguf_bytes, model_metadata, model_tensors
from tests.support.servers.http_harness import HttpServer, http_server

# As gpt-oss and MiniMax-M2 do.
_FIRST_SYSTEM_ONLY: Final = (
    "{% for m in messages %}{% if loop.first or m.role != 'system' %}<{{ m.role }}>{{ m.content }}\n"
    "{% endif %}{% endfor %}<assistant>"
)
USER: Final[dict[str, Any]] = {"role": "user", "content": "question"}


@pytest.fixture(scope="module")
def first_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    model = tmp_path_factory.mktemp("first") / "model.gguf"
    metadata = model_metadata(tokenizer__chat_template=_FIRST_SYSTEM_ONLY)
    model.write_bytes(gguf_bytes(metadata, model_tensors()))
    with http_server(model=str(model), context=2048) as running:
        yield running


@pytest.mark.parametrize("second", ["system", "developer"])
def test_a_second_system_message_reaches_the_prompt(first_only: HttpServer, second: str) -> None:
    system, further = {"role": "system", "content": "ALPHA"}, {"role": second, "content": "BETA"}
    for messages in ([system, further, USER], [system, USER, further], [further, USER, system]):
        prompt = first_only.post("/apply-template", {"messages": messages}).json()["prompt"]
        assert "ALPHA" in prompt
        assert "BETA" in prompt


def test_instructions_and_a_developer_message_both_count(first_only: HttpServer) -> None:
    def tokens(*items: Any) -> int:
        body = {"instructions": "ALPHA", "input": [*items, USER]}
        return int(first_only.post("/v1/responses/input_tokens", body).json()["input_tokens"])

    assert tokens({"role": "developer", "content": "BETA BETA BETA"}) > tokens()
