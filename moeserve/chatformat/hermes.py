"""The inside of a call in the Hermes format, which Qwen3 uses: `{"name": "f", "arguments": {...}}`. Brackets and commas
of a list around it are skipped."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from .call_body import RecordingBody
from .call_json import CallJson
from .events import CallArguments, CallStart, Event
from .json_reader import Status, as_json
from .json_text import is_unicode, to_json
from .tool_calls import CallTags

# `ends`: models close one bracket too many. `following`: Granite 3.1 writes a list.
TAGS: Final = CallTags("<tool_call>", "</tool_call>", following=",", ends=("}", "]"))
_BEFORE: Final = frozenset("[,; \t\r\n")  # characters that may come before the JSON

# The usual beginning of a call, up to the arguments' opening brace. The arguments of such a call are streamed; other
# calls are yielded when they are complete.
_STRING: Final = r'"(?:[^"\\]|\\.)*"'
_HEAD: Final = re.compile(
    rf'\s*\{{\s*(?:"tool_call_id"\s*:\s*(?:{_STRING}|\d+)\s*,\s*)?'
    rf'"(?:tool_)?name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{'
)
_ARGUMENTS_DEPTH: Final = 2


class HermesBody(RecordingBody):
    """Reads a call from the end of its opening tag to the end of its JSON object. See `tool_calls.CallBody`."""

    def __init__(self, index: int, tags: CallTags = TAGS) -> None:
        super().__init__(index)
        self._json = CallJson((tags.close, tags.open))
        self._call: list[str] = []  # the call's JSON
        self._in_json = False
        self._in_arguments = False
        self._decided = False  # it is known whether the arguments are streamed

    def finish(self, events: list[Event]) -> bool:
        if not self._json.end():
            return False
        self._take(events)
        return self._end(events) is Status.DONE

    def _num_held(self) -> int:
        return self._json.num_held

    def _push(self, char: str, events: list[Event]) -> Status:
        if not self._in_json and char in _BEFORE:
            return Status.GOING
        self._in_json = True
        status = self._json.push(char)
        if status is Status.BROKEN:
            return self._broken(self._json.unread)
        self._take(events)
        return self._end(events) if status is Status.DONE else status

    def _take(self, events: list[Event]) -> None:
        """Adds new JSON to the call, and yields the arguments' part of it."""
        shown, depth = self._json.shown, self._json.depth
        self._call.append(shown)
        if not self._decided and depth == _ARGUMENTS_DEPTH:
            self._decided = True
            if shown == "{":
                self._announce(events)
        if self._in_arguments and shown:
            # One tag may have ended both the arguments and the call.
            events.append(CallArguments(self._index, shown if depth else shown[:-1]))
            self._in_arguments = depth >= _ARGUMENTS_DEPTH

    def _announce(self, events: list[Event]) -> None:
        head = _HEAD.fullmatch("".join(self._call))
        if head is None or not is_unicode(name := json.loads(head[1])):
            return
        self.announced = self._in_arguments = True
        events.append(CallStart(self._index, name))

    def _end(self, events: list[Event]) -> Status:
        if not self.announced:
            try:
                call = json.loads("".join(self._call))
                name, text = call.get("name", call.get("tool_name")), to_json(_arguments_of(call))
            except (ValueError, RecursionError):  # a number too long, or brackets nested too deep
                return self._broken(self._json.unread)
            if not isinstance(name, str) or text[0] != "{" or not is_unicode(name):
                return self._broken(self._json.unread)
            self.announced = True
            events += [CallStart(self._index, name), CallArguments(self._index, text)]
        return self._done(events, self._json.unread)


def _arguments_of(call: dict[str, Any]) -> Any:
    """Returns the arguments of a call; they may be JSON within a string."""
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str) and (text := as_json(arguments)) is not None:
        return json.loads(text)
    return arguments
