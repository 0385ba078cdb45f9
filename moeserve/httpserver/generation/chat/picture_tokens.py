"""A rendered conversation with pictures and videos as token ids and spans of embeddings."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Final, NamedTuple

from moeserve.errors import ConfigError
from moeserve.httpserver.generation.chat.picture_text import PictureText
from moeserve.httpserver.generation.engine.picture_client import EncodedPicture
from moeserve.httpserver.generation.request.pictures import MEDIA_MARKER, is_video, split_at_marks
from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.tokenizer.renderer import ChatRenderer
from moeserve.tokenizer.text_tokenizer import TextTokenizer


class _Tiles(NamedTuple):
    """The special tokens of pictures in tiles."""

    beside: str  # between the tiles of a row
    below: str  # after a row
    whole: str  # before the tile of the whole picture


@dataclass(frozen=True, slots=True)
class _Placeholders:
    """The text that stands for a picture in the prompts of one model family. Its special tokens are in angle
    brackets."""

    before: str
    each: str  # one special token, which is repeated
    behind: str
    in_sections: bool = False  # a picture's rows rotate by time, row and column
    alone: str = ""  # the text that chat templates write in place of all the tokens
    tiles: _Tiles | None = None
    # The token that chat templates write for a video, instead of `each`; "" if the family's tower reads no videos.
    video: str = ""
    around: str = ""  # blank lines before and behind a picture, which the processor adds to the prompt's text

    @property
    def whole(self) -> str:
        return self.before + self.each + self.behind

    @property
    def written(self) -> str:
        """The text by which chat templates show a picture."""
        return self.alone or self.whole

    def shown(self, each: str) -> str:
        """Returns the text of a picture in a prompt."""
        return self.around + self.before + each + self.behind + self.around

    def fits(self, tokenizer: TextTokenizer) -> bool:
        """Returns whether the vocabulary has all special tokens."""
        specials = _SPECIAL.findall(self.whole) + ([] if self.tiles is None else [*self.tiles])
        return all(len(tokenizer.encode(special)) == 1 for special in specials)


_SPECIAL: Final = re.compile(r"\]<\][^\[\]]+\[>\[|<[^<>]+>")  # MiniMax's, and all others
_QWEN: Final = _Placeholders(
    "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", in_sections=True, video="<|video_pad|>"
)
_GEMMA3: Final = _Placeholders(
    "<start_of_image>", "<image_soft_token>", "<end_of_image>", alone="<start_of_image>", around="\n\n"
)
# llama.cpp's converter cuts the vocabulary before the last token.
_GEMMA3_CUT: Final = replace(_GEMMA3, each="<start_of_image>")
_GEMMA4: Final = _Placeholders("<|image>", "<|image|>", "<image|>", alone="<|image|>")
_KIMI: Final = _Placeholders("<|media_begin|>image<|media_content|>", "<|media_pad|>", "<|media_end|>")
_GLM: Final = _Placeholders("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", in_sections=True)
_MINIMAX: Final = _Placeholders(
    "]<]start of image[>[", "]<]image[>[", "]<]end of image[>[", alone="]<]image[>["
)
_LLAMA: Final = _Placeholders(
    "<|image_start|>",
    "<|patch|>",
    "<|image_end|>",
    alone="<|image|>",
    tiles=_Tiles("<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>"),
)
_FAMILIES: Final = (_QWEN, _GEMMA4, _KIMI, _GLM, _MINIMAX, _LLAMA, _GEMMA3, _GEMMA3_CUT)


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

    before: list[int]
    each: int
    behind: list[int]
    beside: list[int]  # between tiles; this list and the next two are empty without tiles
    below: list[int]
    whole: list[int]
    of_family: _Placeholders
    text: PictureText

    @classmethod
    def of(cls, tokenizer: TextTokenizer, renderer: ChatRenderer) -> PictureTokens:
        """Finds the vocabulary's tokens for pictures. Raises ConfigError if it has none."""
        family = next((each for each in _FAMILIES if each.fits(tokenizer)), None)
        if family is None:
            known = ", ".join(each.each for each in _FAMILIES)
            raise ConfigError(
                f"--mmproj: the model's vocabulary has none of the known tokens for pictures ({known}, and the tokens "
                "around them); leave the flag out"
            )
        before, [each], behind = map(tokenizer.encode, (family.before, family.each, family.behind))
        beside, below, whole = map(tokenizer.encode, family.tiles or ("", "", ""))
        text = PictureText.of(renderer, family.written)
        return cls(before, each, behind, beside, below, whole, family, text)

    def shown(self, pieces: Sequence[str]) -> str:
        """Returns the pieces as text, with `MEDIA_MARKER` for each picture, and one placeholder for each video."""
        family = self.of_family
        return "".join(
            (family.shown(family.video) if is_video(part) else MEDIA_MARKER) if at % 2 else part
            for piece in pieces
            for at, part in enumerate(split_at_marks(piece))
        )

    def encode(
        self,
        tokenizer: TextTokenizer,
        pieces: Sequence[str],
        pictures: Mapping[str, EncodedPicture],
        begin: Sequence[int] = (),
    ) -> ChatTokens:
        """Returns the prompt's tokens and spans. pieces: from `ModelText.render_chat`; pictures: by their marks; begin:
        tokens before all pieces. Blocks."""
        prompt = _Prompt(self.of_family.in_sections, [*begin], position=len(begin))
        first_token = len(begin)
        text: list[str] = []
        for piece in pieces:
            first, *rest = split_at_marks(piece)
            text.append(first)
            for mark, behind in zip(rest[::2], rest[1::2], strict=True):
                picture = pictures[mark]
                if picture.times:
                    self._add_video(prompt, tokenizer, text, picture)
                    text = [behind]
                    continue
                around = self.of_family.around
                _add_to_last(text, around)
                goes_on = len(prompt.ids) > first_token
                prompt.add_text([*_encoded(tokenizer, text, goes_on=goes_on), *self.before])
                if self.of_family.tiles is None:
                    [part] = picture.parts
                    prompt.add_rows(picture.rows, picture.columns, part, self.each)
                else:
                    self._add_tiles(prompt, picture)
                prompt.add_text(self.behind)
                text = [around + behind]
        prompt.add_text(_encoded(tokenizer, text, goes_on=len(prompt.ids) > first_token))
        return ChatTokens(prompt.ids, tuple(prompt.spans), tuple(pictures.values()))

    def _add_video(
        self, prompt: _Prompt, tokenizer: TextTokenizer, text: list[str], video: EncodedPicture
    ) -> None:
        """Adds the text before a video, and each two frames behind their time."""
        for time, part in zip(video.times, video.parts, strict=True):
            text[-1] += f"<{time:.1f} seconds>"
            prompt.add_text([*_encoded(tokenizer, text, goes_on=bool(prompt.ids)), *self.before])
            prompt.add_rows(video.rows, video.columns, part, self.each)
            prompt.add_text(self.behind)
            text = [""]

    def _add_tiles(self, prompt: _Prompt, picture: EncodedPicture) -> None:
        """Adds the tiles of a picture row by row, and then the whole picture."""
        *tiles, whole = picture.parts
        area = picture.rows * picture.columns // max(1, len(tiles))
        for number, tile in enumerate(tiles, 1):
            prompt.add_tile(tile, area, self.each)
            is_last = number % (picture.columns // isqrt(area)) == 0
            prompt.add_text(self.below if is_last else self.beside)
        prompt.add_text(self.whole)
        prompt.add_tile(whole, area, self.each)


def _add_to_last(text: list[str], more: str) -> None:
    """Adds to the last part that is not empty, so that both become tokens together."""
    at = next((at for at in reversed(range(len(text))) if text[at]), -1)
    text[at] += more


def _encoded(tokenizer: TextTokenizer, parts: list[str], *, goes_on: bool) -> list[int]:
    if not goes_on:
        return tokenizer.encode_parts(parts)
    return [token for part in parts for token in tokenizer.encode_rest(part)]


@dataclass(slots=True)
class _Prompt:
    in_sections: bool
    ids: list[int] = field(default_factory=list)
    spans: list[EmbeddingSpan] = field(default_factory=list)
    position: int = 0  # rotary position of the next row, if pictures rotate in sections

    def add_text(self, ids: list[int]) -> None:
        self.ids += ids
        self.position += len(ids)

    def add_rows(self, rows: int, columns: int, part: tuple[bytes, str], each: int) -> None:
        """Adds the rows of a picture, or of two frames of a video."""
        start, count = len(self.ids), rows * columns
        positions = self._positions(rows, columns) if self.in_sections else b""
        self.spans.append(EmbeddingSpan(start, count, *part, positions))
        self.ids += [each] * count
        self.position += max(rows, columns)

    def add_tile(self, part: tuple[bytes, str], count: int, each: int) -> None:
        """Adds a tile's rows, which rotate like tokens."""
        self.spans.append(EmbeddingSpan(len(self.ids), count, *part))
        self.add_text([each] * count)

    def _positions(self, rows: int, columns: int) -> bytes:
        """Returns `EmbeddingSpan.positions`. Every row has the same time position, from which row and column positions
        count."""
        first = self.position
        positions = array("i", [first]) * (rows * columns)
        positions.extend(first + row for row in range(rows) for _ in range(columns))
        positions.extend(array("i", range(first, first + columns)) * rows)
        return positions.tobytes()
