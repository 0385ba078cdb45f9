"""What the batch folder keeps of a file and of a batch, as it is written to disk."""

from __future__ import annotations

import re
import secrets
from typing import Any, Final, Literal

import msgspec

# The APIs' names of a batch's request and result files differ; the work is the same.
Style = Literal["openai", "anthropic"]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})

_ID: Final = re.compile(r"(file-|batch_|msgbatch_)[0-9a-f]{32}")


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def is_id(text: str) -> bool:
    """Whether the text can be an id of ours: only then is it part of a path."""
    return _ID.fullmatch(text) is not None


class StoredFile(msgspec.Struct, kw_only=True):
    id: str
    owner: str  # of the API key that it came with (`RequestState.key_owner`); "" without keys
    filename: str  # the client's, for the client alone
    purpose: str
    bytes: int
    created_at: int  # seconds since 1970, as all times here
    expires_at: int | None = None
    data: str  # its bytes, relative to the batch folder


class LineError(msgspec.Struct):
    """Why a batch's input was refused; as OpenAI's objects have it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, kw_only=True):
    id: str
    owner: str
    style: Style
    endpoint: str  # the route that answers its lines
    input_file_id: str | None = None  # None: its lines came with it
    requests: str  # its lines, relative to the batch folder
    status: Status = "validating"
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None
    total: int = 0
    counts: dict[str, int] = {}  # requests by `outcomes.Kind`, once it has ended
    # Ids of the files that it will have; the client learns them when they are there.
    output_file_id: str
    error_file_id: str
    has_output: bool = False
    has_errors: bool = False
    output_expires_after: int | None = None  # seconds
    errors: list[LineError] = []
    metadata: dict[str, Any] | None = None

    @property
    def is_ended(self) -> bool:
        return self.status in ENDED

    @property
    def output(self) -> str:
        """The journal of its results, relative to the batch folder."""
        return f"batches/{self.id}.output"

    @property
    def error_output(self) -> str:
        """The same, of requests that failed, where the API keeps those apart."""
        return f"batches/{self.id}.errors"
