"""The inside of a call in the Hermes format, Qwen3's: `{"name": "f", "arguments": {...}}`; in a list, too, what of
which stands around it is passed over."""

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

# Models close one bracket too many; Granite 3.1 writes a list.
TAGS: Final = CallTags("<tool_call>", "</tool_call>", following=",", ends=("}", "]"))
_BEFORE: Final = frozenset("[,; \t\r\n")  # the JSON

# The usual beginning, up to the arguments' brace. Anything else that is a call is shown when it is whole.
_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)
_ARGUMENTS_DEPTH: Final = 2


class HermesBody(RecordingBody):
    """Reads from behind the opening tag to the end of the JSON object. See tool_calls.CallBody."""

    def __init__(self, index: int, tags: CallTags = TAGS) -> None:
        super().__init__(index)
        self._json = CallJson((tags.close, tags.open))
        self._call: list[str] = []  # its JSON
        self._in_json = False
        self._in_arguments = False
        self._decided = False  # whether the arguments are shown as they come

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
        """Takes the JSON that has been added, of which the arguments' is shown."""
        shown, depth = self._json.shown, self._json.depth
        self._call.append(shown)
        if not self._decided and depth == _ARGUMENTS_DEPTH:
            self._decided = True
            if shown == "{":
                self._announce(events)
        if self._in_arguments and shown:
            # A tag may have ended the arguments and the call at once.
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
                name, text = call.get("name"), to_json(_arguments_of(call))
            except (ValueError, RecursionError):  # numbers beyond what Python takes, nesting beyond its stack
                return self._broken(self._json.unread)
            if not isinstance(name, str) or text[0] != "{" or not is_unicode(name):
                return self._broken(self._json.unread)
            self.announced = True
            events += [CallStart(self._index, name), CallArguments(self._index, text)]
        return self._done(events, self._json.unread)


def _arguments_of(call: dict[str, Any]) -> Any:
    """Returns the arguments, which may be JSON in a string."""
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str) and (text := as_json(arguments)) is not None:
        return json.loads(text)
    return arguments
