"""The one error of fetching a model by name."""

from __future__ import annotations

from moeserve.errors import UserError


class HubError(UserError):
    """A model that cannot be had: names the repository, the cause and the remedy."""
