"""The reasoning at the beginning of an answer: `<think>\\n...\\n</think>\\n\\n` in most models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from .answer_tags import AnswerTags
from .events import Event, Reasoning, Text


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags with which a model marks its reasoning. A tag's first character does not occur again within the tag."""

    name: str  # a value of --reasoning-parser
    open_token: str  # the single token with which `open` begins
    open: str
    close: str  # the closing tag, a single token
    ending: str  # the text that templates write after reasoning
    answer: tuple[str, str] = ("", "")  # the tags around the answer, which belong to the format
    marks: tuple[
        str, ...
    ] = ()  # a chat template with all of these texts has these tags; (): the texts are `close` and the answer's tag
    mode: str = ""  # the template's variable with the values "enabled" and "disabled"; "": none
    switch: str = (
        ""  # the template's variable with the values true and false, beside the usual ones; "": none
    )
    budget: str = ""  # the template's variable whose value is 0 without reasoning and -1 without a bound


QWEN3: Final = ReasoningTags("qwen3", "<think>", "<think>", "</think>", "\n</think>\n\n")
HUNYUAN: Final = replace(QWEN3, name="hunyuan", answer=("<answer>", "</answer>"))
ERNIE: Final = replace(QWEN3, name="ernie", answer=("<response>", "</response>"))
GEMMA4: Final = ReasoningTags("gemma4", "<|channel>", "<|channel>thought", "<channel|>", "\n<channel|>")
MISTRAL: Final = ReasoningTags("mistral", "[THINK]", "[THINK]", "[/THINK]", "[/THINK]")
HUNYUAN3: Final = ReasoningTags(
    "hy_v3",
    "<think:opensource>",
    "<think:opensource>",
    "</think:opensource>",
    "</think:opensource>",
    marks=("</think", ":opensource"),  # the template concatenates the tag from parts
)
MINIMAX_M3: Final = ReasoningTags(
    "minimax_m3", "<mm:think>", "<mm:think>", "</mm:think>", "</mm:think>", mode="thinking_mode"
)
SEED: Final = ReasoningTags(
    "seed_oss", "<seed:think>", "<seed:think>", "</seed:think>", "</seed:think>", budget="thinking_budget"
)
# The answer between `<|START_TEXT|>` and `<|END_TEXT|>` (or `RESPONSE`) needs no tags here: they are control tokens.
COHERE: Final = ReasoningTags(
    "cohere",
    "<|START_THINKING|>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|END_THINKING|>",
    switch="reasoning",
)
_ALL: Final = (HUNYUAN3, MINIMAX_M3, HUNYUAN, ERNIE, QWEN3, GEMMA4, MISTRAL, COHERE, SEED)
REASONING_TAGS: Final = {tags.name: tags for tags in _ALL}


def reasoning_tags(template: str) -> ReasoningTags | None:
    """Returns the reasoning tags of a chat template's model; None for a model without reasoning."""
    return next((tags for tags in REASONING_TAGS.values() if _shows(template, tags)), None)


def _shows(template: str, tags: ReasoningTags) -> bool:
    return all(mark in template for mark in tags.marks or (tags.close, tags.answer[0]))


class _Stage(Enum):
    OPENING = auto()  # the text may still begin with reasoning
    REASONING = auto()
    SEPARATOR = auto()  # the line ends between reasoning and answer
    ANSWER = auto()


class ReasoningParser:
    """Splits text into reasoning and answer. The text begins with reasoning, whose opening tag may end the prompt.
    A closing tag at the answer's beginning, which models repeat, belongs to the format. Later tags are text, except the
    tags around the answer. Line ends just inside and after tags belong to the format,
    because templates strip them."""

    def __init__(self, is_open: bool, tags: ReasoningTags = QWEN3) -> None:
        """`is_open`: the prompt has written the opening tag already."""
        self._tags = tags
        self._stage = _Stage.REASONING if is_open else _Stage.OPENING
        self._space: list[str] = []  # white space before `_tag`; dropped if `_tag` becomes a tag
        self._tag = ""  # the beginning of a possible tag
        self._answer = AnswerTags(*tags.answer)
        self._begun = False  # some reasoning has been yielded

    @property
    def is_thinking(self) -> bool:
        return self._stage is _Stage.REASONING

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        at = 0
        while at < len(text):
            if self._stage is _Stage.ANSWER:
                events.append(Text(self._answer.push(text[at:])))
                break
            if self._stage is _Stage.SEPARATOR:
                if not self._separate(text[at]):
                    self._stage = _Stage.ANSWER
                    events.append(Text(self._answer.push(self._take_held())))
                    continue
            elif self._stage is _Stage.OPENING:
                if not self._open(text[at]):
                    self._stage = _Stage.ANSWER
                    events.append(Text(self._answer.push(self._take_held())))
                    continue
            else:
                shown = self._think(text[at])
                if shown:
                    events.append(Reasoning(shown))
            at += 1
        return events

    def finish(self) -> list[Event]:
        """Ends the text."""
        if self._stage is _Stage.REASONING:
            return [Reasoning(self._take_held())] if self._tag else []
        return [Text(self._answer.push(self._take_held()) + self._answer.finish())]

    def _open(self, char: str) -> bool:
        """Returns False if the text does not begin with reasoning; `char` is then not consumed."""
        if char.isspace() and not self._tag:
            self._space.append(char)
            return True
        if not any(tag.startswith(self._tag + char) for tag in (self._tags.open, self._tags.close)):
            return False
        self._tag += char
        if self._tag == self._tags.open:
            self._begin(_Stage.REASONING)
        elif self._tag == self._tags.close:
            self._begin(_Stage.SEPARATOR)
        return True

    def _separate(self, char: str) -> bool:
        """Reads line ends and repeated closing tags. Returns False if `char` belongs to the answer; it is then not
        consumed."""
        if char == "\n" and not self._tag:
            return True
        if not self._tags.close.startswith(self._tag + char):
            return False
        self._tag += char
        if self._tag == self._tags.close:
            self._begin(_Stage.SEPARATOR)
        return True

    def _think(self, char: str) -> str:
        """Returns the part of the reasoning that is now certain."""
        if char == "\n" and not self._tag:
            if self._begun:
                self._space.append(char)
            return ""
        tag = self._tag + char
        if tag == self._tags.close:
            self._begin(_Stage.SEPARATOR)
            return ""
        if self._tags.close.startswith(tag):
            self._tag = tag
            return ""
        self._begun = True
        shown = self._take_held()  # a tag's first character does not occur again in it
        if char == self._tags.close[0]:
            self._tag = char
        elif char == "\n":
            self._space.append(char)
        else:
            shown += char
        return shown

    def _begin(self, stage: _Stage) -> None:
        self._stage = stage
        self._space.clear()
        self._tag = ""

    def _take_held(self) -> str:
        held = "".join(self._space) + self._tag
        self._space.clear()
        self._tag = ""
        return held
