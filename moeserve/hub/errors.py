"""The error of downloading a model by name."""

from __future__ import annotations

from moeserve.errors import UserError


class HubError(UserError):
    """A model cannot be downloaded. The message names the repository, the cause and the remedy."""
