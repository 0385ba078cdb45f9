"""A conversation with a model: questions, and their answers on the screen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moeserve.cli.run.answer import AnswerView, ReasoningView
from moeserve.cli.run.asking import answer_question, tell_end
from moeserve.cli.run.client import ChatClient
from moeserve.cli.run.conversation import Conversation
from moeserve.cli.run.pictures import Picture
from moeserve.cli.run.screen import Screen
from moeserve.cli.running_server import ServedModel


@dataclass
class Session:
    client: ChatClient
    model: ServedModel
    conversation: Conversation
    screen: Screen
    wait_until_ready: Callable[[], object]
    revive: Callable[[], bool] = lambda: False  # see `FoundServer`
    reasoning_view: ReasoningView = "fold"
    verbose: bool = False
    formatted: bool = True  # show Markdown as styles, if the screen supports them
    pictures: list[Picture] = field(default_factory=list)  # for the next question
    last_reasoning: str = ""

    def add_picture(self, picture: Picture) -> None:
        self.pictures.append(picture)
        self.screen.note(f"picture: {picture.name}, {picture.size / 1024:.0f} KiB")

    def ask(self, text: str) -> None:
        """Asks a question and shows the answer. The answer is kept if any of its text arrived. Raises UserError,
        KeyboardInterrupt."""
        view = AnswerView(self.screen, self.reasoning_view, formatted=self.formatted)
        self.conversation.ask(text, self.pictures)
        is_answered = False
        try:
            answer_question(self.client, self.conversation, view, self.wait_until_ready, self.revive)
            is_answered = True
        finally:
            self.last_reasoning = view.reasoning
            if is_answered or view.text:
                self.conversation.answer(view.text)
                self.pictures.clear()
            else:
                self.conversation.take_back()  # the user can get it back with the up arrow, and its pictures are kept
        tell_end(self.screen, view, self.verbose)
