"""Saves a conversation to a file and loads it, for `/save` and `/load`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from moeserve.cli.run.conversation import Conversation, Message
from moeserve.errors import UserError

FORMAT: Final = "moeserve-conversation"
VERSION: Final = 1
MOST_BYTES: Final = 64 << 20
_ROLES: Final = ("user", "assistant")


def save(conversation: Conversation, path: str) -> None:
    """Writes the conversation to a new file that only its owner can read. Raises UserError, also if `path` exists."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "system": conversation.system,
        "messages": conversation.messages,
    }
    try:
        descriptor = os.open(
            Path(path).expanduser(), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    except FileExistsError as error:
        raise UserError(f"{path} already exists; choose another name") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{path} cannot be written: {_why(error)}") from error


def load(conversation: Conversation, path: str) -> None:
    """Replaces the conversation's messages and system prompt by those of a file that `save` wrote. Raises UserError
    and leaves the conversation unchanged if the file cannot be read, is too large or is of another kind."""
    try:
        with open(Path(path).expanduser(), "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise UserError(f"{path} is larger than {MOST_BYTES >> 20} MiB; name a file that /save wrote")
        found = json.loads(data)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path} cannot be read: {_why(error)}") from error
    except ValueError as error:
        raise UserError(f"{path} is not a conversation that /save wrote") from error
    if not _is_conversation(found):
        raise UserError(f"{path} is not a conversation that /save wrote")
    conversation.system = found["system"]
    conversation.messages = found["messages"]


def _is_conversation(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and (found.get("format"), found.get("version")) == (FORMAT, VERSION)
        and isinstance(found.get("system"), str)
        and isinstance(found.get("messages"), list)
        and all(map(_is_message, found["messages"]))
    )


def _is_message(message: Message) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in _ROLES
        and isinstance(message.get("content"), str | list)
        and message.keys() == {"role", "content"}
    )


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
