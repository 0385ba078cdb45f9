"""The official clients, imported where one is made: each process that runs tests collects all of them first, and would
spend three seconds of CPU on the two packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI


def openai_client(url: str, api_key: str = "none") -> OpenAI:
    from openai import OpenAI

    return OpenAI(base_url=url + "/v1", api_key=api_key, max_retries=0, timeout=60)


def anthropic_client(url: str, api_key: str = "none") -> Anthropic:
    from anthropic import Anthropic

    return Anthropic(base_url=url, api_key=api_key, max_retries=0, timeout=60)
