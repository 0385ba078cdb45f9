"""Shows an answer on the screen while it arrives: its text, its reasoning and its figures."""

from __future__ import annotations

import time
from typing import Final, Literal, get_args

from moeserve.cli.run.events import End, Event, Figures, Piece, PromptProgress, Waiting
from moeserve.cli.run.markdown import MarkdownView
from moeserve.cli.run.screen import Screen
from moeserve.cli.run.terminal_text import TerminalFilter

ReasoningView = Literal["fold", "show", "hide"]
REASONING_VIEWS: Final[tuple[ReasoningView, ...]] = get_args(ReasoningView)


class AnswerView:
    """Shows an answer's events. `text` and `reasoning` hold what has arrived, as the model wrote it. formatted: show
    Markdown as terminal styles, if the screen supports them."""

    def __init__(self, screen: Screen, view: ReasoningView, *, formatted: bool = True) -> None:
        self.text = ""
        self.reasoning = ""
        self.figures: Figures | None = None
        self.finish_reason: str | None = None
        self._screen: Final = screen
        self._view: Final = view
        self._filter: Final = TerminalFilter()
        self._reasoning_filter: Final = TerminalFilter()
        self._reasoning_since = 0.0
        self._reads: _Remaining | None = None
        self._markdown: Final = MarkdownView(screen.columns) if formatted and screen.has_styles else None
        self._last = "\n"  # the last character of the answer that was shown
        screen.status("waiting for the answer", now=True)

    def take(self, event: Event) -> None:
        match event:
            case Waiting(text):
                self._screen.status(text)
            case PromptProgress(processed, total) if total:
                self._reads = self._reads or _Remaining()
                left = self._reads.text(processed / total)
                self._screen.status(f"reading the prompt: {processed} of {total} tokens{left}")
            case Piece(text, reasoning):
                if reasoning:
                    self._take_reasoning(reasoning)
                if text:
                    self._take_text(text)
            case Figures():
                self.figures = event
            case End(reason):
                self.finish_reason = reason

    def end(self) -> None:
        """Ends the answer's last line, also if the answer was cut off. The cursor is then at the start of a line."""
        if not self.text:
            self._end_reasoning()
        self._screen.clear_status()
        if self._markdown is not None and (held := self._markdown.end()):
            self._screen.answer(held)
            self._last = held[-1]
        if self._last != "\n":
            self._screen.answer("\n")

    def _take_text(self, text: str) -> None:
        if not self.text:
            self._end_reasoning()
        self.text += text
        if shown := self._filter.take(text):
            self._last = shown[-1]
            self._screen.answer(shown if self._markdown is None else self._markdown.take(shown))

    def _take_reasoning(self, text: str) -> None:
        if not self.reasoning:
            self._reasoning_since = time.monotonic()
            if self._view == "show":
                self._screen.heading("reasoning:")
        self.reasoning += text
        if self._view == "show":
            self._screen.reasoning(self._reasoning_filter.take(text))
        else:
            self._screen.status(f"reasoning, {self._reasoned_s():.0f} s")

    def _end_reasoning(self) -> None:
        if not self.reasoning:
            return
        if self._view == "show":
            self._screen.reasoning("\n\n" if not self.reasoning.endswith("\n") else "\n")
        elif self._view == "fold":
            self._screen.heading(f"reasoned for {self._reasoned_s():.0f} s; /reasoning shows it")

    def _reasoned_s(self) -> float:
        return time.monotonic() - self._reasoning_since


class _Remaining:
    """Estimates the remaining time of a task from its progress so far."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._from: float | None = None

    def text(self, fraction: float) -> str:
        """Returns the remaining time as text, "" while too little is known. fraction: the part of the task that is
        done."""
        if self._from is None:
            self._from = fraction
        gained = fraction - self._from
        if gained < 0.02:
            return ""
        left = (time.monotonic() - self._since) / gained * (1 - fraction)
        return f", {left:.0f} s left"


def figures_line(figures: Figures) -> str:
    """Returns the line of token counts and rates that --verbose shows."""
    cached = "" if figures.cached_tokens is None else f", {figures.cached_tokens} of them cached"
    read = "" if figures.prefill_rate is None else f", {figures.prefill_rate:.1f} tokens/s"
    wrote = "" if figures.decode_rate is None else f", {figures.decode_rate:.1f} tokens/s"
    return f"prompt: {figures.prompt_tokens} tokens{cached}{read}; answer: {figures.completion_tokens} tokens{wrote}"
