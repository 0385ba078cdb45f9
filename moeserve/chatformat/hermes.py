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
# `other_following`: several objects between one pair of tags, without a comma.
TAGS: Final = CallTags(
    "<tool_call>", "</tool_call>", following=",", other_following="{", ends=("}", "]", "```", "</function>")
)
_BEFORE: Final = frozenset("[,; \t\r\n")  # may come before the JSON
_FENCES: Final = ("```json", "```")  # Markdown's, around the JSON
_NAMES: Final = ("name", "tool_name", "tool", "function")  # keys of a call's name
_ARGUMENTS: Final = ("arguments", "parameters", "args", "input")

# How most calls begin, up to the opening brace of the arguments. Then the arguments are streamed. A call with another
# beginning is yielded as a whole, at its end.
_STRING: Final = r'"(?:[^"\\]|\\.)*"'
_HEAD: Final = re.compile(
    rf'\s*\{{\s*(?:"tool_call_id"\s*:\s*(?:{_STRING}|\d+)\s*,\s*)?'
    rf'"(?:tool_)?name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{'
)
_ARGUMENTS_DEPTH: Final = 2


class HermesBody(RecordingBody):
    """Reads a call from the end of its opening tag to the end of its JSON object. See `tool_calls.CallBody`."""

    def __init__(self, index: int, tags: CallTags = TAGS, needs_arguments: bool = False) -> None:
        """needs_arguments: an object that has a name alone is no call."""
        super().__init__(index)
        self._needs_arguments = needs_arguments
        self._json = CallJson((tags.close, tags.open))
        self._call: list[str] = []  # the call's JSON
        self._in_json = False
        self._fence = ""  # the beginning of a Markdown fence before the JSON
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
        if not self._in_json:
            fence = self._fence + char
            if any(one.startswith(fence) for one in _FENCES):
                self._fence = fence
                return Status.GOING
            if char in _BEFORE:
                return Status.GOING
            if self._fence not in ("", *_FENCES):
                return self._broken(char)
        elif char == "{" and "".join(self._call).strip() == "{":
            return Status.GOING  # models double the braces, as a template's format string has them
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
                name, text = _read_call(json.loads("".join(self._call)), self._needs_arguments)
            except (ValueError, RecursionError):  # too long a number, too deep nesting
                return self._broken(self._json.unread)
            if not isinstance(name, str) or text[0] != "{" or not is_unicode(name):
                return self._broken(self._json.unread)
            self.announced = True
            events += [CallStart(self._index, name), CallArguments(self._index, text)]
        return self._done(events, self._json.unread)


def _read_call(call: dict[str, Any], needs_arguments: bool) -> tuple[Any, str]:
    """Returns the name and the arguments' JSON. The arguments may be JSON within a string, the call an OpenAI tool call
    (`{"function": {"name": ..., "arguments": ...}}`). A call without arguments may say `null` or "", or nothing."""
    if isinstance(inner := call.get("function"), dict):
        call = inner
    name = next((call[key] for key in _NAMES if key in call), None)
    given = [call[key] for key in _ARGUMENTS if key in call]
    is_bare_name = len(call) == 1 and not needs_arguments
    arguments: Any = next(
        (one for one in given if one not in (None, "")), {} if given or is_bare_name else None
    )
    if isinstance(arguments, str) and (text := as_json(arguments)) is not None:
        arguments = json.loads(text)
    return name, to_json(arguments)
