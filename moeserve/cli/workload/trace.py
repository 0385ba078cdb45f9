"""Sessions of requests, and the JSONL file that records them.

A line of the file is one request:

    {"arrival": 0.5, "prompt_len": 900, "output_len": 64}
    {"arrival": 0.7, "prompt": [1015, 2231, 877], "output_len": 64}
    {"arrival": 1.2, "prompt_len": 300, "output_len": 40, "prefix": "agent", "prefix_len": 200}
    {"arrival": 1.4, "prompt_len": 120, "output_len": 30, "conversation": "c7"}
    {"think": 8.0, "prompt_len": 250, "output_len": 30, "conversation": "c7"}

Lengths are tokens, times seconds. `prompt_len` is the whole prompt, as a server's log has it. Requests with the same
`prefix` begin with the same `prefix_len` tokens. Lines with the same `conversation` are its turns, in order: each
prompt begins with the prompt before and its answer (which is why c7's second prompt has 250 tokens: 120 + 30, and
100 new ones), and is sent `think` seconds after that answer ended, but not before its own `arrival`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from moeserve.errors import UserError

MAX_TOKENS = 1 << 24
MAX_SECONDS = 1e8  # three years

Length = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class TraceError(UserError):
    """The trace file does not have the format that this module describes; the message names the line."""


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line, as this module describes it. Exactly one of `prompt_len` and `prompt` is given."""

    arrival: Seconds = 0.0
    prompt_len: Length | None = None
    prompt: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)] | None = None
    output_len: Length
    prefix: str | None = None
    prefix_len: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    conversation: str | None = None
    think: Seconds = 0.0

    @property
    def whole_len(self) -> int:
        return len(self.prompt) if self.prompt is not None else self.prompt_len or 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    input_len: int  # tokens that the request adds to the session's prefix or history
    output_len: int
    not_before: float = 0.0  # seconds from the start
    think: float = 0.0  # seconds after the previous answer
    prompt: bytes | None = None  # the whole prompt, int32, if the trace contains it


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow one another, usually only one. Sessions with the same `prefix` number begin with the
    same `prefix_len` tokens."""

    turns: tuple[Turn, ...]
    prefix: int = 0
    prefix_len: int = 0

    @property
    def arrival(self) -> float:
        return self.turns[0].not_before


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions in order of arrival. `seed` determines the tokens of prompts of which only the length is given."""

    sessions: tuple[Session, ...]
    seed: int = 0

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


def read_trace(path: Path, seed: int) -> Workload:
    """Reads a trace file. Raises TraceError, OSError."""
    decoder = msgspec.json.Decoder(TraceLine)
    chains: dict[
        str, list[TraceLine]
    ] = {}  # by conversation; a request without one is a conversation of its own
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if text.isspace():
                continue
            try:
                line = decoder.decode(text)
                chain = chains.setdefault(f"c{line.conversation}" if line.conversation else f"#{number}", [])
                _check(line, chain)
            except (msgspec.DecodeError, ValueError) as error:
                raise TraceError(f"{path}, line {number}: {error}") from None
            chain.append(line)
    if not chains:
        raise TraceError(f"{path}: no request in it")
    groups: dict[str, int] = {}  # numbered as they first appear
    sessions = [_session(chain, groups) for chain in chains.values()]
    return Workload(tuple(sorted(sessions, key=lambda session: session.arrival)), seed)


def _check(line: TraceLine, before: list[TraceLine]) -> None:
    """Raises ValueError for faults that the types do not show."""
    if (line.prompt_len is None) == (line.prompt is None):
        raise ValueError("a request has either `prompt_len` or `prompt`")
    if (line.prefix is None) != (line.prefix_len == 0):
        raise ValueError("`prefix` and `prefix_len` come together")
    if line.prefix is not None and (before or line.prompt is not None):
        raise ValueError(
            "`prefix` is for the first turn of a conversation, and for a prompt given by its length; leave it out here"
        )
    if before and line.prompt is None and line.whole_len <= before[-1].whole_len + before[-1].output_len:
        raise ValueError(
            f"`prompt_len` {line.whole_len} leaves nothing new after the turn before, which takes "
            f"{before[-1].whole_len} + {before[-1].output_len} tokens; raise it"
        )
    if line.prefix_len >= line.whole_len:
        raise ValueError("`prefix_len` must be less than `prompt_len`")
    if line.think and not before:
        raise ValueError("`think` is for the later turns of a conversation")


def _session(chain: list[TraceLine], groups: dict[str, int]) -> Session:
    history = chain[0].prefix_len
    turns: list[Turn] = []
    for line in chain:
        prompt = None if line.prompt is None else array("i", line.prompt).tobytes()
        turns.append(
            Turn(max(line.whole_len - history, 0), line.output_len, line.arrival, line.think, prompt)
        )
        history = line.whole_len + line.output_len
    prefix = chain[0].prefix
    group = 0 if prefix is None else groups.setdefault(prefix, len(groups))
    return Session(tuple(turns), group, chain[0].prefix_len)


def write_trace(path: Path, workload: Workload) -> None:
    """Writes the workload as a file that `read_trace` reads. Raises OSError."""
    lines = sorted(_lines(workload), key=lambda numbered: numbered[0])
    with path.open("wb") as file:
        for _, line in lines:
            file.write(msgspec.json.encode(line) + b"\n")


def _lines(workload: Workload) -> Iterable[tuple[float, TraceLine]]:
    """Yields each line with the arrival time of its session, which orders the file and keeps turns in order."""
    for number, session in enumerate(workload.sessions):
        for line in _session_lines(session, number):
            yield session.arrival, line


def _session_lines(session: Session, number: int) -> Iterator[TraceLine]:
    history = session.prefix_len
    for index, turn in enumerate(session.turns):
        first = index == 0
        whole = history + turn.input_len if turn.prompt is None else len(turn.prompt) // 4
        yield TraceLine(
            arrival=turn.not_before,
            prompt_len=whole if turn.prompt is None else None,
            prompt=None if turn.prompt is None else array("i", turn.prompt).tolist(),
            output_len=turn.output_len,
            prefix=f"p{session.prefix}" if first and session.prefix_len else None,
            prefix_len=session.prefix_len if first else 0,
            conversation=f"c{number}" if len(session.turns) > 1 else None,
            think=turn.think,
        )
        history = whole + turn.output_len
