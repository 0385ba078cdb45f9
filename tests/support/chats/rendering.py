"""Prompts for tests that have no event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from moeserve.tokenizer import ChatRenderer


def render_now(renderer: ChatRenderer, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """As ChatRenderer.render, of which `options` are; blocks."""
    return asyncio.run(renderer.render(messages, **options))
