"""The error that refuses a grammar."""

from __future__ import annotations

from moeserve.errors import UserError


class GrammarError(UserError):
    """The schema, pattern or grammar is wrong, not supported or too complex. The client sees the text."""
