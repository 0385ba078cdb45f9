"""Keeps control tokens that users and tools spell out as plain text. Only the control tokens that the chat template
writes become tokens.

The rendered text contains both kinds. So a mark that cannot be guessed is inserted into each spelled-out token before
rendering, and the rendered text is cut at the marks. No piece then has the whole spelled-out token."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

_TRUSTED_ROLES: Final = ("system", "developer", "assistant")


class LiteralText:
    """The marks of one conversation."""

    def __init__(self, control_tokens: Iterable[str]) -> None:
        self._tokens = [token for token in control_tokens if token]
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._tokens, key=len, reverse=True))))
        self._mark = secrets.token_hex(16)

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the messages with marks in all texts of roles that are not trusted."""
        return [
            dict(message) if message.get("role") in _TRUSTED_ROLES else self._marked(dict(message))
            for message in messages
        ]

    def cut(self, text: str) -> list[str]:
        """Cuts a rendered text at the marks. All control tokens in the pieces were written by the template."""
        return text.split(self._mark)

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, dict):
            return {
                name: one if name in ("role", "type") else self._marked(one) for name, one in value.items()
            }
        if isinstance(value, list):
            return [self._marked(one) for one in value]
        return value

    def _marked_text(self, text: str) -> str:
        if self._tokens:
            text = self._pattern.sub(lambda found: found[0][0] + self._mark + found[0][1:], text)
        ends_in_part = any(
            text.endswith(token[:length]) for token in self._tokens for length in range(1, len(token))
        )
        return text + self._mark if ends_in_part else text  # the next text may complete a token
