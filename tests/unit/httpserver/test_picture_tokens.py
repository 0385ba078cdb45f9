"""The tokens around pictures, by family: what a prompt gets, and what the publisher's template writes beside it."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gguf import GGUFWriter

from moeserve.errors import ConfigError
from moeserve.httpserver.generation.chat.picture_tokens import PictureTokens
from moeserve.httpserver.generation.engine.picture_client import EncodedPicture
from moeserve.httpserver.generation.request.pictures import MEDIA_MARKER, Picture
from moeserve.messages.pictures import PictureEncoded
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer import TextTokenizer
from moeserve.tokenizer.renderer import ChatRenderer

LETTERS = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
CONTROL = 3
# Kimi-K2.5's template shows a picture by these tokens and a line's end.
KIMI = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
GLM = KIMI.replace(
    "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n",
    "<|begin_of_image|><|image|><|end_of_image|>",
)
MINIMAX = GLM.replace("<|begin_of_image|><|image|><|end_of_image|>", "]<]image[>[")


def tokenizer_with(path: Path, special: list[str], merges: list[str] | None = None) -> TextTokenizer:
    """Bytes, and these. merges: in addition to one."""
    merges = ["i n", *(merges or [])]
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*LETTERS, *(each.replace(" ", "") for each in merges), *special])
    writer.add_token_types([1] * (len(LETTERS) + len(merges)) + [CONTROL] * len(special))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(LETTERS) + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return TextTokenizer.from_gguf(open_gguf(path))


@contextmanager
def renderer_of(template: str) -> Iterator[ChatRenderer]:
    renderer = ChatRenderer(template, {})
    try:
        yield renderer
    finally:
        renderer.close()


def tokens_of(tokenizer: TextTokenizer, template: str) -> PictureTokens:
    with renderer_of(template) as renderer:
        return PictureTokens.of(tokenizer, renderer)


@pytest.mark.parametrize(
    ("special", "template", "before", "each", "behind", "text_behind", "in_sections"),
    [
        (
            ["<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"],
            KIMI, "<|media_begin|>image<|media_content|>", "<|media_pad|>", "<|media_end|>", "\n", False,
        ),
        (
            ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|image_pad|>"],
            GLM, "<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "", True,
        ),
        (
            ["]<]image[>[", "]<]start of image[>[", "]<]end of image[>["],
            MINIMAX, "]<]start of image[>[", "]<]image[>[", "]<]end of image[>[", "", False,
        ),
    ],
    ids=["Kimi-K2.5", "GLM-4.6V", "MiniMax-M3"],
)  # fmt: skip
def test_a_prompt(
    tmp_path: Path, special: list[str], template: str, before: str, each: str, behind: str, text_behind: str,
    *, in_sections: bool,
) -> None:  # fmt: skip
    tokenizer = tokenizer_with(tmp_path / "vocabulary.gguf", special)
    found = tokens_of(tokenizer, template)
    assert found.text.behind == text_behind
    assert not found.text.trims
    mark = Picture(b"1").mark
    (message,) = found.text.placed([{"role": "user", "content": f"Look: {mark}What?"}])
    picture = EncodedPicture(PictureEncoded(1, 2, 3, bytes(32), "0a", 0.1, False), lambda handle: None)
    prompt = found.encode(tokenizer, [message["content"]], {mark: picture})
    head = [*tokenizer.encode("Look: "), *tokenizer.encode(before)]
    (pad,) = tokenizer.encode(each)
    assert prompt.ids == [
        *head,
        *[pad] * 6,
        *tokenizer.encode(behind),
        *tokenizer.encode(f"{text_behind}What?"),
    ]
    (span,) = prompt.spans
    assert (span.start, span.count) == (len(head), 6)
    first = len(head)
    sections = array("i", [first] * 6 + [first] * 3 + [first + 1] * 3 + [first, first + 1, first + 2] * 2)
    assert span.positions == (sections.tobytes() if in_sections else b"")
    assert found.shown([f"a{mark}b"]) == f"a{MEDIA_MARKER}b"


# Gemma 3's template, for user's messages.
GEMMA3 = (
    "{% for m in messages %}<start_of_turn>user\n{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text | trim }}"
    "{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
)
GEMMA3_SPECIAL = ["<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"]


@pytest.fixture(scope="module")
def gemma3() -> Iterator[ChatRenderer]:
    with renderer_of(GEMMA3) as renderer:
        yield renderer


@pytest.mark.parametrize("each", ["<image_soft_token>", "<start_of_image>"], ids=["whole", "cut"])
@pytest.mark.parametrize("parts", ["|What?", "Look: | What?", "||", "a|b|c"])
def test_gemma_3(gemma3: ChatRenderer, tmp_path: Path, each: str, parts: str) -> None:
    """As its processor: blank lines around each picture are tokens together with the text beside them. A file of
    llama.cpp's converter has no <image_soft_token>."""
    special = [*GEMMA3_SPECIAL, *[each] * (each not in GEMMA3_SPECIAL)]
    path = tmp_path / "vocabulary.gguf"
    tokenizer = tokenizer_with(path, special, ["Ċ Ċ", "ĊĊ Ċ", "ĊĊ ĊĊ"])
    found = PictureTokens.of(tokenizer, gemma3)
    pictures, content = {}, parts
    for number in range(parts.count("|")):
        mark = Picture(b"1").mark
        message = PictureEncoded(number, 2, 2, bytes(32), f"{number:02x}", 0.1, False)
        pictures[mark] = EncodedPicture(message, lambda handle: None)
        content = content.replace("|", mark, 1)
    rendered = gemma3.render_now(found.text.placed([{"role": "user", "content": content}]))
    begin, behind = rendered[: len("<start_of_turn>user\n")], rendered[len("<start_of_turn>user\n") :]
    prompt = found.encode(tokenizer, [begin, behind], pictures)
    whole = f"\n\n<start_of_image>{each * 4}<end_of_image>\n\n"
    # The processor's text: the template's with each <start_of_image> replaced.
    text = "".join(part.strip() if part != "|" else whole for part in re.split(r"(\|)", parts))
    expected = f"<start_of_turn>user\n{text}<end_of_turn>\n"
    assert prompt.ids == tokenizer.encode(expected)
    assert found.shown([begin, behind]) == expected.replace(whole, MEDIA_MARKER)
    (pad,) = tokenizer.encode(each)
    assert all(prompt.ids[span.start : span.end] == [pad] * 4 for span in prompt.spans)
    assert len(prompt.spans) == len(pictures)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 3), (3, 1)])
def test_tiles(tmp_path: Path, rows: int, columns: int) -> None:
    """As Llama 4's processor: each row of tiles ends with a separator, and the whole picture comes last."""
    special = ["<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>", "<|tile_x_separator|>"]
    tokenizer = tokenizer_with(tmp_path / "vocabulary.gguf", [*special, "<|tile_y_separator|>"])
    found = tokens_of(tokenizer, MINIMAX.replace("]<]image[>[", "<|image|>"))
    tiles = rows * columns + (rows * columns > 1)
    more = tuple((bytes([number] * 32), f"{number:02x}") for number in range(1, tiles))
    message = PictureEncoded(1, 2 * rows, 2 * columns, bytes(32), "00", 0.1, False, more)
    removed: list[str] = []
    picture = EncodedPicture(message, removed.append)
    mark = Picture(b"1").mark
    prompt = found.encode(tokenizer, [f"a{mark}b"], {mark: picture})
    row = "<|tile_x_separator|>".join(["<|patch|>" * 4] * columns) + "<|tile_y_separator|>"
    text = f"a<|image_start|>{row * rows if tiles > 1 else ''}<|image|>{'<|patch|>' * 4}<|image_end|>b"
    assert prompt.ids == tokenizer.encode(text)
    assert [span.handle for span in prompt.spans] == ["00", *(handle for _, handle in more)]
    assert [span.sha256[0] for span in prompt.spans] == [*range(tiles)]
    (patch,) = tokenizer.encode("<|patch|>")
    assert all(prompt.ids[span.start : span.end] == [patch] * 4 for span in prompt.spans)
    assert sum(token == patch for token in prompt.ids) == 4 * tiles
    del picture, prompt
    assert sorted(removed) == [f"{number:02x}" for number in range(tiles)]


def test_a_vocabulary_with_some_of_the_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "vocabulary.gguf", ["<|media_pad|>", "<|media_end|>"])
    with pytest.raises(ConfigError, match="known tokens for pictures"):
        tokens_of(tokenizer, KIMI)
