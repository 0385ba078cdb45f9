"""The reasons why a grammar may be refused."""

from __future__ import annotations

from moeserve.errors import UserError


class GrammarError(UserError):
    """The schema, pattern or grammar is wrong, not supported or too complex: the text is for the client."""
