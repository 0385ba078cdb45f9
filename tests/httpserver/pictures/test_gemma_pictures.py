"""Gemma 4's pictures in requests: the tokens around them, and the text that its chat template writes beside them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeserve.errors import ConfigError
from moeserve.httpserver.generation.chat.picture_text import PictureText
from moeserve.httpserver.generation.chat.picture_tokens import PictureTokens
from moeserve.httpserver.generation.request.pictures import Picture
from moeserve.models.open import open_metadata
from moeserve.tokenizer import TextTokenizer
from moeserve.tokenizer.renderer import ChatRenderer
from tests.support.pictures.picture_fixture import GEMMA_MODEL, GEMMA_TOWER, MODEL, gemma_picture_cases
from tests.support.pictures.visual_server import VisualServer, seeing_server
from tests.support.servers.http_harness import NAME, HttpServer, tokens_of

CASE = gemma_picture_cases()["square"]
BASE64 = base64.b64encode(CASE.path.read_bytes()).decode()
START, EACH, END = 628, 630, 629
BEFORE, BEHIND = "Look at this: ", " What does the keeper see?"
# As Google's template has them: texts of parts and whole contents are trimmed.
GEMMA_TEMPLATE = """{%- for m in messages -%}
{{ '<|turn>' + m['role'] + '\n' }}
{%- if m['content'] is string -%}{{ m['content'] | trim }}
{%- else -%}
{%- for item in m['content'] -%}
{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}
{%- elif item['type'] == 'image' -%}{{ AROUND[0] + '<|image|>' + AROUND[1] }}
{%- endif -%}{%- endfor -%}
{%- endif -%}{{ '<turn|>\n' }}
{%- endfor -%}{{ '<|turn>model\n' }}"""


def gemma_template(before: str = "", behind: str = "") -> str:
    return GEMMA_TEMPLATE.replace("AROUND[0]", repr(before)).replace("AROUND[1]", repr(behind))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma") / "template.jinja"
    path.write_text(gemma_template())
    return path


@pytest.fixture(scope="module", params=["chatml", "gemma"])
def world(request: pytest.FixtureRequest, template: Path) -> Iterator[tuple[HttpServer, VisualServer, str]]:
    more: dict[str, Any] = {} if request.param == "chatml" else {"chat_template": str(template)}
    with seeing_server(model=str(GEMMA_MODEL), mmproj=str(GEMMA_TOWER), **more) as (server, visual):
        yield server, visual, request.param


def test_the_prompt(world: tuple[HttpServer, VisualServer, str]) -> None:
    """A picture's rows rotate as text does. The fixture's template takes no parts; Gemma's own trims them."""
    server, visual, kind = world
    server.begin_anew()
    content = [
        {"type": "text", "text": BEFORE},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}},
        {"type": "text", "text": BEHIND},
    ]
    body = {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    (request,) = server.requests
    encode = server.tokenizer.encode
    if kind == "chatml":
        head, tail = f"<|im_start|>user\n{BEFORE}", f"{BEHIND}<|im_end|>\n<|im_start|>assistant\n"
    else:
        head, tail = f"<|turn>user\n{BEFORE.strip()}", f"{BEHIND.strip()}<turn|>\n<|turn>model\n"
    tokens = tokens_of(request)
    assert tokens == [*encode(head), START, *[EACH] * 6, END, *encode(tail)]
    (span,) = request.spans
    assert (span.start, span.count, span.positions) == (len(encode(head)) + 1, 6, b"")
    shown = server.post("/apply-template", body).json()["prompt"]
    assert shown == f"{head}<__media__>{tail}"
    assert len(visual.pictures) > 0


def test_the_prompt_is_the_fixture_s(world: tuple[HttpServer, VisualServer, str]) -> None:
    """But for the number of the picture's tokens: as transformers' processor has it."""
    encode = world[0].tokenizer.encode
    head, tail = encode(f"<|im_start|>user\n{BEFORE}"), encode(f"{BEHIND}<|im_end|>\n<|im_start|>assistant\n")
    assert CASE.tokens == [*head, START, *[EACH] * CASE.num_tokens, END, *tail]


@pytest.mark.parametrize("around", [("", ""), ("\n\n", "\n\n"), ("<pic> ", " </pic>")])
def test_what_a_template_writes_around_pictures(around: tuple[str, str]) -> None:
    renderer = ChatRenderer(gemma_template(*around), {})
    try:
        found = PictureText.of(renderer, "<|image|>")
    finally:
        renderer.close()
    assert found == PictureText(*around, trims=True)
    mark = Picture(b"1").mark
    messages = [
        {"role": "user", "content": f"\n one  {mark} two {mark}"},
        {"role": "assistant", "content": " three "},
    ]
    before, behind = around
    assert found.placed(messages) == [
        {"role": "user", "content": f"one{before}{mark}{behind}two{before}{mark}{behind}"},
        {"role": "assistant", "content": " three "},
    ]


IMAGE = "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}"
PLAIN = {
    "parts as they come": "{% for part in messages[0].content %}" + IMAGE + "{% endfor %}",
    "no parts": "{{ 'user: ' + messages[0].content }}",
    "parts as data": "{{ messages[0].content | tojson }}",
    "parts without pictures": "{% for part in messages[0].content %}{{ part.text }}{% endfor %}",
    "an error": "{{ raise_exception('texts alone') }}",
}


@pytest.mark.parametrize("name", PLAIN)
def test_templates_that_write_nothing_of_their_own(name: str) -> None:
    renderer = ChatRenderer(PLAIN[name], {})
    try:
        assert PictureText.of(renderer, "<|image|>") == PictureText()
    finally:
        renderer.close()


def test_a_vocabulary_without_pictures() -> None:
    tokenizer = TextTokenizer.from_gguf(open_metadata(MODEL.parents[1] / "tiny-qwen2moe-q4_k_m.gguf"))
    renderer = ChatRenderer(PLAIN["no parts"], {})
    try:
        with pytest.raises(ConfigError, match="known tokens for pictures"):
            PictureTokens.of(tokenizer, renderer)
    finally:
        renderer.close()
