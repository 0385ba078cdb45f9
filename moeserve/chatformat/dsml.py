"""DSML: the calls of DeepSeek-V3.2 and V4. A block holds any number of calls; V3.2 names it `function_calls`, V4
`tool_calls`:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="name">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>

`string` says whether the value is a text or JSON. Models also write the arguments as one JSON object, omit the block's
tags or misspell them, and omit `｜DSML｜` in an argument's tags.
"""

from __future__ import annotations

from typing import Final

from .call_json import CallJson
from .events import CallStart, Event
from .guided import GuidedCalls, GuidedTags
from .json_reader import Status
from .tag_heads import attributes_head
from .tagged import TaggedBody
from .tool_calls import CallTags
from .value_end import TaggedSyntax
from .values import Schemas

MARK: Final = "｜DSML｜"  # a token
# Names of blocks.
_NAMES: Final = ("tool_calls", "function_calls", "toolcalls", "tool_call", "toolcall", "calls")
_INVOKE: Final = f"<{MARK}invoke"

SYNTAX: Final = TaggedSyntax(
    name_open=_INVOKE,
    name_close=">",
    key_open=f"<{MARK}parameter",
    key_close=">",
    value_open="",
    value_close=f"</{MARK}parameter>",
    close=f"</{MARK}invoke>",
    head=attributes_head,
    other_key_open="<parameter",
    other_value_close="</parameter>",
)


def tags(block: str) -> CallTags:
    """Returns the tags of a block with this name."""
    others = [name for name in _NAMES if name != block]
    return CallTags(
        f"<{MARK}{block}>",
        f"</{MARK}{block}>",
        other_opens=tuple(f"<{MARK}{name}>" for name in others),
        bare=_INVOKE,
        following=_INVOKE,
        ends=(SYNTAX.value_close, SYNTAX.close, *(f"</{MARK}{name}>" for name in others)),
    )


def _guided(block: str, before_arguments: str, behind: str, in_tags: GuidedTags | None) -> GuidedCalls:
    return GuidedCalls(
        open=f"<{MARK}{block}>",
        before_name=f'\n{_INVOKE} name="',
        before_arguments=before_arguments,
        behind=behind,
        close=f"\n</{MARK}{block}>",
        separator="",
        is_block=True,
        tags=in_tags,
    )


def guided(block: str) -> GuidedCalls:
    """Returns the form that a grammar enforces, with the arguments as one JSON object."""
    return _guided(block, '">\n', "\n" + SYNTAX.close, None)


def own_calls(block: str) -> GuidedCalls:
    typed = '" string="{}">'.format
    in_tags = GuidedTags(
        f'{SYNTAX.key_open} name="',
        typed("true"),
        "",
        SYNTAX.value_close,
        "\n",
        before_json=typed("false"),
    )
    return _guided(block, '">\n', SYNTAX.close, in_tags)


class DsmlBody(TaggedBody):
    """Reads a call whose arguments stand in tags, or are one JSON object after the name's tag."""

    def __init__(self, index: int, schemas: Schemas, tags: CallTags, is_guided: bool = False) -> None:
        super().__init__(index, schemas, SYNTAX, tags, is_guided)
        self._json: CallJson | None = None

    def finish(self, events: list[Event]) -> bool:
        if self._json is None:
            return super().finish(events)
        if not self._json.end():
            return False
        self._emit(self._json.shown, events)
        self._done(events)
        return True

    def _num_held(self) -> int:
        return super()._num_held() + (0 if self._json is None else self._json.num_held)

    def _push(self, char: str, events: list[Event]) -> Status:
        return super()._push(char, events) if self._json is None else self._json_text(char, events)

    def _between(self, char: str, events: list[Event]) -> Status:
        if char != "{" or self._held or self._keys:
            return super()._between(char, events)
        self._json = CallJson((self._syntax.close, self._tags.close, self._syntax.name_open))
        self.announced = True
        events.append(CallStart(self._index, self._name))
        return self._json_text(char, events)

    def _json_text(self, char: str, events: list[Event]) -> Status:
        assert self._json is not None
        status = self._json.push(char)
        self._emit(self._json.shown, events)
        if status is Status.BROKEN:
            return self._broken(self._json.unread)
        return self._done(events, self._json.unread) if status is Status.DONE else status
