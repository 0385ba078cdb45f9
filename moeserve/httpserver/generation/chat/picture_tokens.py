"""A rendered conversation with pictures as token ids and spans of embeddings."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from moeserve.errors import ConfigError
from moeserve.httpserver.generation.chat.picture_text import PictureText
from moeserve.httpserver.generation.engine.picture_client import EncodedPicture
from moeserve.httpserver.generation.request.pictures import split_at_marks
from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.tokenizer.renderer import ChatRenderer
from moeserve.tokenizer.text_tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class _Placeholders:
    """The special tokens for pictures of one model family."""

    before: str
    each: str
    behind: str
    written: str  # the text by which chat templates show a picture
    in_sections: bool  # a picture's rows rotate by time, row and column

    @property
    def all(self) -> tuple[str, str, str]:
        return self.before, self.each, self.behind


_QWEN: Final = _Placeholders(
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    written="<|vision_start|><|image_pad|><|vision_end|>",
    in_sections=True,
)
_GEMMA4: Final = _Placeholders("<|image>", "<|image|>", "<image|>", written="<|image|>", in_sections=False)


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """A prompt. It holds references to its pictures' embeddings, which keep them alive."""

    ids: list[int]
    spans: tuple[EmbeddingSpan, ...] = ()
    pictures: tuple[EncodedPicture, ...] = ()


NO_CHAT: Final = ChatTokens([])  # for plain prompts


@dataclass(frozen=True, slots=True)
class PictureTokens:
    """The tokens around a picture, and the placeholder that stands for each of the picture's own tokens."""

    before: int
    each: int
    behind: int
    of_family: _Placeholders
    text: PictureText

    @classmethod
    def of(cls, tokenizer: TextTokenizer, renderer: ChatRenderer) -> PictureTokens:
        """Finds the vocabulary's tokens for pictures. Raises ConfigError if it has none."""
        for family in (_QWEN, _GEMMA4):
            ids = [tokenizer.encode(text) for text in family.all]
            if all(len(found) == 1 for found in ids):
                before, each, behind = (found[0] for found in ids)
                return cls(before, each, behind, family, PictureText.of(renderer, family.written))
        raise ConfigError(
            f"--mmproj: the model's vocabulary has neither {_QWEN.before} nor {_GEMMA4.before}; leave it out"
        )

    def shown(self, pieces: Sequence[str]) -> str:
        """Returns the pieces as text, with one placeholder for each picture."""
        placeholder = "".join(self.of_family.all)
        return "".join(
            placeholder if at % 2 else part
            for piece in pieces
            for at, part in enumerate(split_at_marks(piece))
        )

    def encode(
        self, tokenizer: TextTokenizer, pieces: Sequence[str], pictures: Mapping[str, EncodedPicture]
    ) -> ChatTokens:
        """Returns the prompt's tokens and spans. pieces: from `ModelText.render_chat`; pictures: by their marks.
        Blocks."""
        prompt = _Prompt(self.of_family.in_sections)
        text: list[str] = []
        for piece in pieces:
            first, *rest = split_at_marks(piece)
            text.append(first)
            for mark, behind in zip(rest[::2], rest[1::2], strict=True):
                picture = pictures[mark]
                prompt.add_text([*_encoded(tokenizer, text, goes_on=bool(prompt.ids)), self.before])
                prompt.add_picture(picture, self.each)
                prompt.add_text([self.behind])
                text = [behind]
        prompt.add_text(_encoded(tokenizer, text, goes_on=bool(prompt.ids)))
        return ChatTokens(prompt.ids, tuple(prompt.spans), tuple(pictures.values()))


def _encoded(tokenizer: TextTokenizer, parts: list[str], *, goes_on: bool) -> list[int]:
    if not goes_on:
        return tokenizer.encode_parts(parts)
    return [token for part in parts for token in tokenizer.encode_rest(part)]


@dataclass(slots=True)
class _Prompt:
    in_sections: bool
    ids: list[int] = field(default_factory=list)
    spans: list[EmbeddingSpan] = field(default_factory=list)
    position: int = 0  # rotary position of the next row, where pictures have sections

    def add_text(self, ids: list[int]) -> None:
        self.ids += ids
        self.position += len(ids)

    def add_picture(self, picture: EncodedPicture, each: int) -> None:
        """Adds a picture's rows."""
        start, count = len(self.ids), picture.rows * picture.columns
        positions = self._positions(picture) if self.in_sections else b""
        self.spans.append(EmbeddingSpan(start, count, picture.sha256, picture.handle, positions))
        self.ids += [each] * count
        self.position += max(picture.rows, picture.columns)

    def _positions(self, picture: EncodedPicture) -> bytes:
        """Returns `EmbeddingSpan.positions`: every row has the same time position; row and column positions count from
        it."""
        rows, columns, first = picture.rows, picture.columns, self.position
        positions = array("i", [first]) * (rows * columns)
        positions.extend(first + row for row in range(rows) for _ in range(columns))
        positions.extend(array("i", range(first, first + columns)) * rows)
        return positions.tobytes()
