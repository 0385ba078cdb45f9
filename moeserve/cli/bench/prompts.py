"""Writes a workload's prompts for a server: as token ids if the server accepts them, else as text; or as a chat.

Texts consist of common English words of about one token each. Two requests of one token measure how many tokens a word
and an empty prompt take, by the `usage` that the server returns. The figures of a run do not depend on this estimate:
they use the server's count of each prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np

from moeserve.cli.bench.client import Client, StreamedAnswer
from moeserve.cli.bench.pictures import PictureUrls
from moeserve.cli.workload.prompts import Int32s, TokenHistory, prefix_ids, turn_ids
from moeserve.cli.workload.trace import Workload
from moeserve.errors import UserError

_TEXT = (
    "the of and to in that was his he it with is for as had you not be her on at by which have or from this him but "
    "she they were my are me one their so an said them we who would been will no when there if more out up into do any "
    "your what has man could other than our some very time upon about may its only now like little then can should "
)
WORDS = tuple(_TEXT.split())
EMPTY: Final[PictureUrls] = MappingProxyType({})


class Prompts(Protocol):
    """One session's prompts for one server."""

    def body(self, turn: int) -> dict[str, Any]:
        """Returns the request's fields for a turn's prompt. Call it for the turns in order."""
        ...

    def answered(self, answer: StreamedAnswer) -> None:
        """Stores an answer, which the next turn's prompt repeats."""
        ...


Writer = Callable[[int], Prompts]  # makes a session's prompts from its index in the workload


class IdPrompts:
    def __init__(self, workload: Workload, session: int) -> None:
        self._history = TokenHistory(workload, session)
        self._continues = len(workload.sessions[session].turns) > 1

    def body(self, turn: int) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": self._history.prompt(turn).tolist()}
        return body | {"return_token_ids": True} if self._continues else body

    def answered(self, answer: StreamedAnswer) -> None:
        self._history.answered(np.array(answer.token_ids, np.int32))


@dataclass(frozen=True, slots=True)
class WordCount:
    """A prompt of n words has empty + per_word * n tokens."""

    empty: float
    per_word: float

    def words(self, tokens: int, *, first: bool = False) -> int:
        """Returns the number of words for `tokens` tokens, at least 1. first: the tokens of an empty prompt are
        subtracted."""
        return max(round((tokens - (self.empty if first else 0.0)) / self.per_word), 1)


class WordPrompts:
    """A session's prompts as text: the session's prefix, which may be empty, and its turns."""

    def __init__(self, workload: Workload, session: int, count: WordCount) -> None:
        self._workload = workload
        self._session = session
        self._count = count
        length = workload.sessions[session].prefix_len
        words = count.words(length, first=True) if length else 0
        self.prefix = _words(prefix_ids(workload, session, words))

    def turn(self, turn: int) -> str:
        wanted = self._workload.sessions[self._session].turns[turn]
        if wanted.prompt is not None:
            return _words(np.frombuffer(wanted.prompt, np.int32))
        words = self._count.words(wanted.input_len, first=turn == 0 and not self.prefix)
        return _words(turn_ids(self._workload, self._session, turn, words))


class TextPrompts:
    def __init__(self, workload: Workload, session: int, count: WordCount) -> None:
        self._words = WordPrompts(workload, session, count)
        self._text = self._words.prefix

    def body(self, turn: int) -> dict[str, Any]:
        self._text += self._words.turn(turn)
        return {"prompt": self._text}

    def answered(self, answer: StreamedAnswer) -> None:
        self._text += answer.text


class ChatPrompts:
    """A session's prompts as a chat: the prefix is the system message, turns are user messages."""

    def __init__(
        self, workload: Workload, session: int, count: WordCount, pictures: PictureUrls = EMPTY
    ) -> None:
        self._words = WordPrompts(workload, session, count)
        self._session = session
        self._pictures = pictures
        system = {"role": "system", "content": self._words.prefix}
        self._messages: list[dict[str, Any]] = [system] if self._words.prefix else []

    def body(self, turn: int) -> dict[str, Any]:
        text: str = self._words.turn(turn)
        urls = self._pictures.get((self._session, turn), [])
        pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [{"type": "text", "text": text}, *pictures] if pictures else text
        self._messages.append({"role": "user", "content": content})
        return {"messages": self._messages}

    def answered(self, answer: StreamedAnswer) -> None:
        self._messages.append({"role": "assistant", "content": answer.text})


def _words(ids: Int32s) -> str:
    """Returns words for token ids. Equal ids give equal words, so prompts with a common prefix of ids also have a
    common prefix as text."""
    return "".join([f" {WORDS[id % len(WORDS)]}" for id in ids.tolist()])


class ProbeFailed(UserError):
    """The server fails even a request of one token. The message is the server's."""


async def choose_writer(
    client: Client, workload: Workload, *, chat: bool, text: bool, pictures: PictureUrls = EMPTY
) -> tuple[Writer, str]:
    """Returns the best way of writing prompts that this server accepts, and its name. The requests sent here also warm
    the server up. pictures: for chats. Raises ProbeFailed."""
    if not chat and not text and await _takes_ids(client, workload):
        return (lambda session: IdPrompts(workload, session)), "token ids"
    count = await _word_count(client, chat)
    if chat:
        return (lambda session: ChatPrompts(workload, session, count, pictures)), "chat messages"
    return (lambda session: TextPrompts(workload, session, count)), "text"


async def _takes_ids(client: Client, workload: Workload) -> bool:
    """Returns whether the server accepts token ids as prompts and, if sessions have several turns, returns answers as
    ids."""
    body: dict[str, Any] = {"prompt": list(range(1000, 1016)), "max_tokens": 2}
    if any(len(session.turns) > 1 for session in workload.sessions):
        answer = await client.ask(body | {"return_token_ids": True}, 16)
        return not answer.outcome.error and len(answer.token_ids) > 0
    answer = await client.ask(body, 16)
    if answer.status in (0, 401, 403, 404) or answer.status >= 500:
        raise ProbeFailed(answer.outcome.error)  # the error is not about the prompt's form
    return not answer.outcome.error


async def _word_count(client: Client, chat: bool) -> WordCount:
    counts: list[int] = []
    for words in (32, 160):
        text = _words(np.arange(words, dtype=np.int32))
        prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        answer = await client.ask(prompt | {"max_tokens": 1}, words)
        if answer.outcome.error:
            raise ProbeFailed(answer.outcome.error)
        counts.append(answer.outcome.prompt_len)
    per_word = max((counts[1] - counts[0]) / 128, 0.25)
    return WordCount(max(counts[0] - 32 * per_word, 0.0), per_word)
