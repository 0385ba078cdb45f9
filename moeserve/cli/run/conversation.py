"""The messages of a chat so far, and the request that continues it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moeserve.cli.run.pictures import Picture

Message = dict[str, Any]  # of the chat API


@dataclass
class Conversation:
    model: str
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def ask(self, text: str, pictures: Sequence[Picture] = ()) -> None:
        """Adds a question; its pictures come before its text."""
        content: str | list[dict[str, Any]] = text
        if pictures:
            content = [{"type": "image_url", "image_url": {"url": picture.url}} for picture in pictures]
            content += [{"type": "text", "text": text}] if text else []
        self.messages.append({"role": "user", "content": content})

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Removes a question that was not answered."""
        self.messages.pop()

    def set(self, name: str, value: Any) -> None:
        """Changes a setting of the requests. None: the server's own default."""
        if value is None:
            self.settings.pop(name, None)
        else:
            self.settings[name] = value

    def body(self) -> dict[str, Any]:
        """Returns the body of a streamed chat request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model,
            "messages": [*system, *self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
            **self.settings,
        }
