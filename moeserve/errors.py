"""Errors a user can act on."""

from __future__ import annotations


class UserError(Exception):
    """Shown to the user as its message alone, never as a traceback: it names the cause and the remedy.

    The errors of a bad file, a bad flag or a busy port derive from it (`ModelError`, `ConfigError`, ...).
    Anything else that ends a process is a bug of ours and is logged with its traceback.
    """


class ConfigError(UserError):
    """A flag or an environment variable has a value we cannot use; the message names which."""


class FileError(ConfigError):
    """A file or folder that an option names is missing or cannot be used. It may come or change later, unlike the
    option's value."""
