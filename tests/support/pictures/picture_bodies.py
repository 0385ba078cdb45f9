"""Bodies of requests with a picture, and the prompt that they make."""

from __future__ import annotations

import base64
from typing import Any

from tests.support.pictures.picture_fixture import picture_cases
from tests.support.servers.http_harness import NAME, HttpServer

CASE = picture_cases()["square"]
FILE = CASE.path.read_bytes()


BASE64 = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{BASE64}"
START, PAD, END = 628, 630, 629
BEFORE, BEHIND = "Look at this: ", " What does the keeper see?"


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": [*parts]}]} | more


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url} | more}


def prompt_of(seeing: HttpServer, before: str = BEFORE, behind: str = BEHIND) -> list[int]:
    encode = seeing.tokenizer.encode
    head = encode(f"<|im_start|>user\n{before}") if before else encode("<|im_start|>user\n")
    return [*head, START, *[PAD] * 6, END, *encode(f"{behind}<|im_end|>\n<|im_start|>assistant\n")]
