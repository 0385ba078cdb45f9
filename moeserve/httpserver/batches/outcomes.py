"""Outcome: how a request of a batch ended, and the outcome's line in each API's results file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from moeserve.httpserver.batches.records import Style, new_id

Kind = Literal["succeeded", "errored", "canceled", "expired"]

_OPENAI_REASONS: Final = {
    "canceled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    custom_id: str
    kind: Kind
    status: int = 0  # HTTP status of the answer; 0: there is no answer
    body: bytes = b"null"  # JSON
    request_id: str = ""


def is_error_line(style: Style, outcome: Outcome) -> bool:
    """Returns whether the result belongs in the separate errors file that OpenAI's batches have."""
    return style == "openai" and outcome.kind != "succeeded"


def line_of(style: Style, outcome: Outcome) -> bytes:
    return _openai(outcome) if style == "openai" else _anthropic(outcome)


def _openai(outcome: Outcome) -> bytes:
    line: dict[str, Any] = {
        "id": new_id("batch_req_"),
        "custom_id": outcome.custom_id,
        "response": None,
        "error": None,
    }
    if outcome.kind in _OPENAI_REASONS:
        code, message = _OPENAI_REASONS[outcome.kind]
        line["error"] = {"code": code, "message": message}
    else:
        body = orjson.Fragment(outcome.body)
        line["response"] = {"status_code": outcome.status, "request_id": outcome.request_id, "body": body}
    return orjson.dumps(line)


def _anthropic(outcome: Outcome) -> bytes:
    result: dict[str, Any] = {"type": outcome.kind}
    if outcome.kind == "succeeded":
        result["message"] = orjson.Fragment(outcome.body)
    elif outcome.kind == "errored":
        result["error"] = orjson.Fragment(outcome.body)
    return orjson.dumps({"custom_id": outcome.custom_id, "result": result})


class Tally:
    """Records which requests of a batch have a result, and counts the results of each kind."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        self.kinds: Counter[str] = Counter()

    def add(self, outcome: Outcome) -> None:
        self.done.add(outcome.custom_id)
        self.kinds[outcome.kind] += 1

    def take(self, line: dict[str, Any]) -> None:
        """Adds a line that an earlier server has written."""
        self.done.add(line["custom_id"])
        if "result" in line:
            self.kinds[line["result"]["type"]] += 1
        elif (error := line["error"]) is not None:
            self.kinds["expired" if error["code"] == "batch_expired" else "canceled"] += 1
        else:
            self.kinds["succeeded" if line["response"]["status_code"] == 200 else "errored"] += 1
