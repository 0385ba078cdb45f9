"""What a grammar may be refused for."""

from __future__ import annotations

from moeserve.errors import UserError


class GrammarError(UserError):
    """The schema, pattern or grammar is wrong, not supported or too complex: the text is for the client."""
