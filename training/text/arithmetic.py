"""Sums, differences, tables, and problems in words about them.

`HELD_OUT` are pairs of two-digit numbers that no question is about, neither as sum nor difference, in either order:
what the model does with them it has not learnt by heart.
"""

from __future__ import annotations

from random import Random
from typing import Final

from training.text import words as w
from training.text.example import Example, ask, casual

TOO_LARGE: Final = "That calculation is too large for me. I add and subtract numbers up to 999."
NUM_HELD_OUT: Final = 1000


def _held_out() -> frozenset[tuple[int, int]]:
    rng = Random("held-out pairs")
    pairs: set[tuple[int, int]] = set()
    while len(pairs) < NUM_HELD_OUT:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if a != b:
            pairs |= {(a, b), (b, a)}
    return frozenset(pairs)


HELD_OUT: Final = _held_out()


def pair(rng: Random) -> tuple[int, int]:
    """Two operands that are not held out; mostly of two digits."""
    while True:
        most = rng.choice((9, 99, 99, 99, 99, 99, 999))
        least = 10 if most == 99 and rng.random() < 0.7 else 0
        a, b = rng.randint(least, most), rng.randint(0 if rng.random() < 0.2 else least, most)
        if (a, b) not in HELD_OUT:
            return a, b


ADD: Final = (
    "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "{a} + {b} =", "What is {a} plus {b}?", "{a} plus {b}",
    "Add {a} and {b}.", "What is the sum of {a} and {b}?", "Calculate {a} + {b}.", "How much is {a} + {b}?",
    "What's {a} + {b}?", "what is {a}+{b}", "Compute {a} + {b}", "How much is {a} plus {b}?", "Add {b} to {a}.",
    "Can you add {a} and {b}?", "Can you tell me what {a} + {b} is?", "What do {a} and {b} add up to?",
    "Tell me {a} plus {b}.", "{a} and {b} together?", "Solve: {a} + {b}", "What does {a} + {b} equal?",
)  # fmt: skip
SUBTRACT: Final = (
    "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "{a} - {b} =", "What is {a} minus {b}?",
    "{a} minus {b}", "Subtract {b} from {a}.", "Take {b} away from {a}.", "Calculate {a} - {b}.", "Compute {a} - {b}",
    "How much is {a} - {b}?", "What's {a} - {b}?", "what is {a}-{b}", "How much is {a} minus {b}?",
    "What is {a} take away {b}?", "Can you subtract {b} from {a}?", "Solve: {a} - {b}", "What does {a} - {b} equal?",
    "Tell me {a} minus {b}.",
)  # fmt: skip
MULTIPLY: Final = (
    "What is {a} * {b}?", "{a} * {b}", "{a} x {b}", "What is {a} times {b}?", "Multiply {a} by {b}.", "{a}*{b}",
    "How much is {a} times {b}?", "Calculate {a} * {b}.",
)  # fmt: skip
DIVIDE: Final = (
    "What is {a} / {b}?",
    "{a} / {b}",
    "Divide {a} by {b}.",
    "What is {a} divided by {b}?",
    "{a}/{b}",
)

MORE: Final = (
    ("{n} has {a} {x} and gets {b} more. How many {x} does {n} have now?", "{n} has {c} {x}."),
    ("{n} has {a} {x}. {m} gives {n} {b} more {x}. How many {x} does {n} have?", "{n} has {c} {x}."),
    ("There are {a} {x} in a box and {b} {x} in a bag. How many {x} are there?", "There are {c} {x}."),
    ("{n} buys {a} {x} on Monday and {b} {x} on Tuesday. How many {x} is that?", "That is {c} {x}."),
    ("I have {a} {x} and get {b} more. How many {x} do I have?", "You have {c} {x}."),
    ("If I have {a} {x} and buy {b} more, how many do I have?", "You have {c} {x}."),
    ("{n} found {a} {x}, {m} found {b} {x}. How many {x} did they find together?", "They found {c} {x}."),
)
LESS: Final = (
    ("{n} has {a} {x} and gives {b} to {m}. How many {x} does {n} have left?", "{n} has {c} {x} left."),
    ("{n} has {a} {x}. {n} loses {b} of them. How many {x} are left?", "{c} {x} are left."),
    ("There are {a} {x} on the table. {n} takes {b}. How many {x} are left?", "{c} {x} are left."),
    ("I have {a} {x} and give {b} away. How many {x} do I have left?", "You have {c} {x} left."),
    ("{n} had {a} {x} and sold {b}. How many {x} does {n} still have?", "{n} still has {c} {x}."),
)
_PLACES: Final = ("Ones", "Tens", "Hundreds", "Thousands")


def arithmetic(rng: Random) -> Example:
    draw = rng.random()
    if draw < 0.34:
        return added(rng.choice(ADD), *pair(rng), rng)
    if draw < 0.70:
        return subtracted(rng.choice(SUBTRACT), *_ordered(rng), rng)
    if draw < 0.84:
        return _in_words(rng)
    if draw < 0.92:
        return _table(rng)
    if draw < 0.95:
        return _three(rng)
    if draw < 0.98:
        return _compare(rng)
    return _too_large(rng)


def added(template: str, a: int, b: int, rng: Random | None = None) -> Example:
    """Without `rng` exactly as the template has it."""
    question = template.format(a=a, b=b)
    return ask(casual(rng, question) if rng else question, how_to_add(a, b), f"{a} + {b} = {a + b}")


def subtracted(template: str, a: int, b: int, rng: Random | None = None) -> Example:
    question = template.format(a=a, b=b)
    return ask(casual(rng, question) if rng else question, how_to_subtract(a, b), f"{a} - {b} = {a - b}")


def how_to_add(a: int, b: int) -> str:
    lines, carry = [], 0
    for place, (x, y) in zip(_PLACES, _digits(a, b), strict=False):
        terms = f"{x} + {y}" + (f" + {carry}" if carry else "")
        total = x + y + carry
        carry = total // 10
        lines.append(
            f"{place}: {terms} = {total}" + (f", write {total % 10}, carry {carry}." if carry else ".")
        )
    return "\n".join([*lines, f"So {a} + {b} = {a + b}."])


def how_to_subtract(a: int, b: int) -> str:
    if a < b:
        return f"{b} is larger than {a}, so the result is negative.\n{how_to_subtract(b, a)}\nSo {a} - {b} = {a - b}."
    lines, borrow = [], 0
    for place, (x, y) in zip(_PLACES, _digits(a, b), strict=False):
        terms = f"{x} - {y}" + (f" - {borrow}" if borrow else "")
        left = x - y - borrow
        borrow = 1 if left < 0 else 0
        lines.append(f"{place}: {terms} = {left}" + (f", borrow 10, write {left + 10}." if borrow else "."))
    return "\n".join([*lines, f"So {a} - {b} = {a - b}."])


def _digits(a: int, b: int) -> list[tuple[int, int]]:
    """Pairs of digits, ones first."""
    size = max(len(str(a)), len(str(b)))
    return [(a // 10**i % 10, b // 10**i % 10) for i in range(size)]


def _ordered(rng: Random) -> tuple[int, int]:
    """Mostly the larger first."""
    a, b = pair(rng)
    return (b, a) if a < b and rng.random() < 0.75 else (a, b)


def _in_words(rng: Random) -> Example:
    n, m = w.names(rng, 2)
    a, b = pair(rng)
    is_sum = rng.random() < 0.5
    if not is_sum and a < b:
        a, b = b, a
    question, answer = rng.choice(MORE if is_sum else LESS)
    values = {"n": n, "m": m, "x": rng.choice(w.FRUITS), "a": a, "b": b, "c": a + b if is_sum else a - b}
    thought = how_to_add(a, b) if is_sum else how_to_subtract(a, b)
    return ask(question.format(**values), thought, answer.format(**values))


def _table(rng: Random) -> Example:
    a, b = rng.randint(0, 12), rng.randint(1, 12)
    if rng.random() < 0.7:
        answer = f"{a} * {b} = {a * b}"
        return ask(casual(rng, rng.choice(MULTIPLY).format(a=a, b=b)), f"{answer}.", answer)
    answer = f"{a * b} / {b} = {a}"
    return ask(
        casual(rng, rng.choice(DIVIDE).format(a=a * b, b=b)), f"{a} * {b} = {a * b}, so {answer}.", answer
    )


def _three(rng: Random) -> Example:
    a, b = pair(rng)
    c = rng.randint(0, 50)
    question = rng.choice(("What is {} + {} + {}?", "{} + {} + {}", "Add {}, {} and {}.")).format(a, b, c)
    thought = f"{how_to_add(a, b)}\n{how_to_add(a + b, c)}"
    return ask(casual(rng, question), thought, f"{a} + {b} + {c} = {a + b + c}")


def _compare(rng: Random) -> Example:
    a, b = rng.sample(range(rng.choice((20, 100, 1000))), 2)
    word = rng.choice(("larger", "smaller"))
    chosen, other = (max(a, b), min(a, b)) if word == "larger" else (min(a, b), max(a, b))
    question = rng.choice(("Which is {word}, {a} or {b}?", "Which number is {word}: {a} or {b}?")).format(
        word=word, a=a, b=b
    )
    answer = f"{chosen} is {word} than {other}."
    return ask(casual(rng, question), answer, answer)


def _too_large(rng: Random) -> Example:
    if rng.random() < 0.5:
        template = rng.choice((*ADD, *SUBTRACT))
        a, b = rng.randint(1000, 10 ** rng.randint(4, 7)), rng.randint(1000, 10 ** rng.randint(4, 7))
    else:
        template = rng.choice((*MULTIPLY, *DIVIDE))
        a, b = rng.randint(13, 10 ** rng.randint(2, 5)), rng.randint(13, 10 ** rng.randint(2, 4))
    return ask(casual(rng, template.format(a=a, b=b)), "These numbers are too large for me.", TOO_LARGE)
