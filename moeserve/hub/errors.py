"""The error of downloading a model by name."""

from __future__ import annotations

from moeserve.errors import UserError

# What to do where the cache is another user's, or the disk is read-only.
ANOTHER_CACHE = "name a folder of your own in HF_HUB_CACHE, or change the owner of this one"


class HubError(UserError):
    """A model cannot be downloaded. The message names the repository, the cause and the remedy."""
