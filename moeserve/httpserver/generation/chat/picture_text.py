"""The text around a picture, as the chat template writes it.

Templates get a message's content as one text, in which a mark stands for a picture. If they got the parts as a list,
some templates would trim the texts beside a picture (Gemma 4's does) or write text around it. So at the start one
message in parts is rendered: a picture between two words. The template's changes between the two words are then made to
every message.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeserve.httpserver.generation.request.pictures import split_at_marks
from moeserve.tokenizer.errors import TemplateError
from moeserve.tokenizer.renderer import ChatRenderer


@dataclass(frozen=True, slots=True)
class PictureText:
    before: str = ""
    behind: str = ""
    trims: bool = False  # texts beside pictures lose the spaces at their ends

    @classmethod
    def of(cls, renderer: ChatRenderer, written: str) -> PictureText:
        """Returns what the template writes around a picture, found by rendering one. written: the text by which the
        template shows a picture. A template that takes no parts, or writes another text, changes nothing."""
        first, second = secrets.token_hex(8), secrets.token_hex(8)
        parts = [{"type": "text", "text": f" {first} "}, {"type": "image"}]
        parts.append({"type": "text", "text": f" {second} "})
        try:
            text = renderer.render_now([{"role": "user", "content": parts}])
        except TemplateError:
            return cls()
        between = text.partition(first)[2].partition(second)[0]
        if between.count(written) != 1:
            return cls()
        before, _, behind = between.partition(written)
        if before[:1] == behind[-1:] == " ":
            return cls(before[1:], behind[:-1])
        return cls(before, behind, trims=True)

    def placed(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the messages with each mark surrounded by the text that the template would write."""
        return [
            {**message, "content": self._around(content)}
            if isinstance(content := message.get("content"), str)
            else dict(message)
            for message in messages
        ]

    def _around(self, content: str) -> str:
        parts = split_at_marks(content)
        if len(parts) == 1:
            return content
        return "".join(
            f"{self.before}{part}{self.behind}" if at % 2 else part.strip() if self.trims else part
            for at, part in enumerate(parts)
        )
