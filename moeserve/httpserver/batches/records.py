"""The records of files and batches in the batch folder, in the form in which they are written to disk."""

from __future__ import annotations

import re
import secrets
from typing import Any, Final, Literal

import msgspec

# The two APIs have different objects for a batch; the work is the same.
Style = Literal["openai", "anthropic"]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})

_ID: Final = re.compile(r"(file-|batch_|msgbatch_)[0-9a-f]{32}")


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def is_id(text: str) -> bool:
    """Returns whether the text has the form of this server's ids; only then may it be part of a path."""
    return _ID.fullmatch(text) is not None


class StoredFile(msgspec.Struct, kw_only=True):
    id: str
    owner: str  # owner of the API key that uploaded it (`RequestState.key_owner`); "" without keys
    filename: str  # as the client sent it; only shown to the client
    purpose: str
    bytes: int
    created_at: int  # seconds since 1970, like all times here
    expires_at: int | None = None
    data: str  # path of its bytes, relative to the batch folder


class LineError(msgspec.Struct):
    """Why a batch's input was refused, in the form of OpenAI's objects."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, kw_only=True):
    id: str
    owner: str
    style: Style
    endpoint: str  # the route that answers its lines
    input_file_id: str | None = None  # None: the requests were sent with the batch
    requests: str  # path of its lines, relative to the batch folder
    status: Status = "validating"
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None
    total: int = 0
    counts: dict[str, int] = {}  # number of requests by `outcomes.Kind`, once the batch has ended
    # Ids of the batch's future result files; the client sees an id when the file exists.
    output_file_id: str
    error_file_id: str
    has_output: bool = False
    has_errors: bool = False
    output_expires_after: int | None = None  # seconds
    losses: dict[str, int] = {}  # how often a server has ended over a line without a result, by its custom_id
    errors: list[LineError] = []
    metadata: dict[str, Any] | None = None

    @property
    def is_ended(self) -> bool:
        return self.status in ENDED

    @property
    def output(self) -> str:
        """Path of the journal of its results, relative to the batch folder."""
        return f"batches/{self.id}.output"

    @property
    def error_output(self) -> str:
        """Path of the journal of failed requests, for OpenAI's API, which has a separate file for them."""
        return f"batches/{self.id}.errors"
