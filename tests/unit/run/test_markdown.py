"""Markdown as a terminal shows it, in whole answers and in pieces."""

from __future__ import annotations

import random
import re

import pytest

from moeserve.cli.run.markdown import MOST_HELD, MarkdownView

STYLE = re.compile("\x1b\\[([0-9;]+)m")
ANSWER = """# Plan for `x`

Some **bold *and italic* text**, 5*3 = 15, snake_case_name, 2 * 3 * 4, _it_ and ~~no~~.
**Never closed
- item **one**
  * nested
12. twelfth
- [x] done
- [ ] to do
> quoted *words*

```python
def f(a):
    return a ** 2  # **x** _y_
`` not the end
```
***
| Name | Size |
|:---|---:|
| **a** | 1 |
| 日本 | `22` |

The area is \\(a \\cdot b\\), with \\*stars\\*, ***both*** and ``a `b` c``."""
PLAIN = """Plan for x

Some bold and italic text, 5*3 = 15, snake_case_name, 2 * 3 * 4, it and no.
**Never closed
• item one
  • nested
12. twelfth
☑ done
☐ to do
│ quoted words

```python
def f(a):
    return a ** 2  # **x** _y_
`` not the end
```
────────────────────────────────────────
Name │ Size
─────┼─────
a    │    1
日本 │   22

The area is \\(a \\cdot b\\), with *stars*, both and a `b` c."""


def rendered(*pieces: str, columns: int = 80) -> str:
    view = MarkdownView(lambda: columns)
    return "".join(map(view.take, pieces)) + view.end()


def plain(text: str) -> str:
    return STYLE.sub("", text)


def test_an_answer() -> None:
    shown = rendered(ANSWER)
    assert plain(shown) == PLAIN
    for styled in (
        "\x1b[1;4mPlan for \x1b[0m",
        "\x1b[1;3mand italic\x1b[0m",
        "\x1b[36m    return a ** 2  # **x** _y_\x1b[0m",
        "\x1b[9mno\x1b[0m",
        "\x1b[1mName │ Size\x1b[0m",
    ):
        assert styled in shown


@pytest.mark.parametrize("seed", range(20))
def test_pieces_show_the_same(seed: int) -> None:
    """Each piece ends its own style, whatever it was cut from."""
    draw = random.Random(seed)
    view, at, shown = MarkdownView(lambda: 80), 0, list[str]()
    while at < len(ANSWER):
        size = draw.randint(1, 6)
        shown.append(view.take(ANSWER[at : at + size]))
        at += size
    for piece in shown:
        assert [*STYLE.findall(piece), "0"][-1] == "0"
    assert plain("".join(shown) + view.end()) == PLAIN


def test_text_is_shown_as_it_comes() -> None:
    view = MarkdownView(lambda: 80)
    assert view.take("Here is") == "Here is"
    assert view.take(" a `na") == " a "
    assert plain(view.take("me`, and")) == "name, and"
    assert view.take("\n```\nx =") == "\n\x1b[2m```\x1b[0m\n\x1b[36mx =\x1b[0m"


@pytest.mark.parametrize(
    "text",
    [
        *("**", "*", "a `b", "- ", "#", "| a | b |", "```", "~~~\ncode", "1.", "__init__.py", "a * b * c"),
        *("#hashtag", "-5 degrees", "2) no", "f(*args, **kwargs)", "C:\\path\\*", "| a |\n| b |\nend"),
        *("* " * 600 + "x", "`" * 50, "$x_1 + y_2$", "\n\n", "a\n", "[x](http://y/z_1_2)"),
    ],
)
def test_what_is_no_markdown_stays_as_it_was_written(text: str) -> None:
    kept = text.replace("* ", "• ", 1) if text.startswith("* ") else text
    kept = {"- ": "• ", "__init__.py": "__init__.py", "C:\\path\\*": "C:\\path*"}.get(text, kept)
    assert plain(rendered(*text)) == kept
    assert plain(rendered(text)) == kept


def test_a_table_that_is_too_wide_keeps_its_lines() -> None:
    table = "| a | b |\n|---|---|\n| long words | 2 |\n"
    assert plain(rendered(table, columns=12)) == table
    assert plain(rendered(table, columns=14)).startswith("a          │ b\n")


def test_a_mark_that_is_never_closed_holds_little_text() -> None:
    view = MarkdownView(lambda: 80)
    shown = view.take("**" + "word " * (MOST_HELD // 5 + 1))
    assert shown.startswith("**word word")


def test_a_hostile_line_takes_no_time() -> None:
    """A quadratic rule would take minutes."""
    line = "*a **b _c `d ~~e " * 6000
    assert plain(rendered(line)).startswith("*a **b _c d ~~e *a")
