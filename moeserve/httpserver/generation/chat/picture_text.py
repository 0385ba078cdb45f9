"""The text around a picture, as the chat template writes it.

Templates here get a message's content as one text, in which a picture is a mark. Given the parts as a list, some
templates would trim the texts beside a picture (Gemma 4's does) or write something around it. So one message in parts,
a picture between two words, is rendered at the start; what the template did between the words is then done to every
message.
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
        """Finds out what the template does. written: the text by which it shows a picture. A template that takes no
        parts, or writes another text, changes nothing."""
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
        """Returns the messages with each mark surrounded as the template would do it."""
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
