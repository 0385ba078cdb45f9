"""Options whose values are not Unicode: file names in another encoding than the system's."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable

from moeserve.cli.command_line import flag_name
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError


def check_unicode(config: ServerConfig) -> None:
    """Raises ConfigError for a text that has bytes that the system's encoding lacks. Python reads each as half of a
    surrogate pair, which JSON cannot hold: the server's processes get the options, and clients the model's name, as
    JSON."""
    for option in dataclasses.fields(config):
        value = getattr(config, option.name)
        texts: Iterable[object] = value if isinstance(value, tuple) else (value,)
        for text in texts:
            if isinstance(text, str) and not _is_unicode(text):
                encoding = sys.getfilesystemencoding()
                other = "" if encoding == "utf-8" else ", or start with LC_ALL=C.UTF-8"
                raise ConfigError(
                    f"{flag_name(option.name)}: {text!a} has bytes that are not {encoding}; rename the file or folder"
                    f"{other}"
                )


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)
