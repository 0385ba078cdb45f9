"""Questions about a text in the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from training.text import words as w
from training.text.example import Example, Message, ask, assistant, user

UNKNOWN: Final = "The text does not say."


@dataclass(frozen=True)
class Fact:
    """A sentence, and what may be asked about it: (question, answer)."""

    sentence: str
    questions: tuple[tuple[str, str], ...]


NameOf = Callable[[Random], str]


def _location(rng: Random, name: str, taken: set[str]) -> Fact:
    place = _fresh(rng, w.ROOMS, taken)
    verb, asks = rng.choice(
        (("is", "is"), ("is", "is"), ("sits", "sits"), ("sleeps", "sleeps"), ("waits", "waits"))
    )
    sentence = f"{name} {verb} in the {place}."
    where = f"Where is {name}?" if asks == "is" else f"Where does {name} {asks.removesuffix('s')}?"
    who = f"Who is in the {place}?" if asks == "is" else f"Who {asks} in the {place}?"
    return Fact(sentence, ((where, sentence), (where, sentence), (who, sentence)))


def _moved(rng: Random, name: str, taken: set[str]) -> Fact:
    before, place = _fresh(rng, w.ROOMS, taken), _fresh(rng, w.ROOMS, taken)
    first = f"{name} was in the {before}. " if rng.random() < 0.5 else ""
    went = rng.choice((f"Then {name} went to the {place}.", f"{name} went to the {place}."))
    where = f"{name} is in the {place}."
    return Fact(first + went, ((f"Where is {name}?", where), (f"Where is {name} now?", where)))


def _possession(rng: Random, name: str, taken: set[str]) -> Fact:
    thing = _fresh(rng, w.OBJECTS, taken)
    whose = (f"What does {name} have?", f"Who has the {thing}?")
    if rng.random() >= 0.5:
        sentence = f"{name} has {w.a(thing)}."
        return Fact(sentence, tuple((question, sentence) for question in whose))
    colour = _fresh(rng, w.COLOURS, taken)
    sentence = f"{name} has {w.a(colour)} {thing}."
    which = (f"What colour is the {thing}?", f"What colour is {name}'s {thing}?")
    answers = [
        *((question, sentence) for question in whose),
        *((q, f"The {thing} is {colour}.") for q in which),
    ]
    return Fact(sentence, tuple(answers))


def _job(rng: Random, name: str, taken: set[str]) -> Fact:
    job = _fresh(rng, w.JOBS, taken)
    sentence = f"{name} is {w.a(job)}."
    return Fact(
        sentence,
        (
            (f"What is {name}'s job?", sentence),
            (f"What does {name} do?", sentence),
            (f"Who is the {job}?", f"{name} is the {job}."),
        ),
    )


def _taste(rng: Random, name: str, taken: set[str]) -> Fact:
    food = _fresh(rng, w.FOODS, taken)
    verb = rng.choice(("like", "love", "hate", "eat"))
    sentence = f"{name} {verb}s {food}."
    return Fact(sentence, ((f"What does {name} {verb}?", sentence), (f"Who {verb}s {food}?", sentence)))


def _age(rng: Random, name: str, taken: set[str]) -> Fact:
    sentence = f"{name} is {_fresh(rng, [str(i) for i in range(2, 100)], taken)} years old."
    return Fact(sentence, ((f"How old is {name}?", sentence),))


def _home(rng: Random, name: str, taken: set[str]) -> Fact:
    city = w.city(rng)
    while city in taken:
        city = w.city(rng)
    taken.add(city)
    sentence = f"{name} lives in {city}."
    return Fact(sentence, ((f"Where does {name} live?", sentence), (f"Who lives in {city}?", sentence)))


def _friend(rng: Random, name: str, taken: set[str]) -> Fact:
    other = _fresh(rng, w.NAMES, taken)
    relation = rng.choice(
        ("brother", "sister", "friend", "teacher", "boss", "uncle", "neighbour", "mother", "cousin")
    )
    sentence = f"{name}'s {relation} is {other}."
    return Fact(
        sentence,
        (
            (f"Who is {name}'s {relation}?", sentence),
            (f"What is the name of {name}'s {relation}?", sentence),
        ),
    )


def _scene(rng: Random, name: str, taken: set[str]) -> Fact:
    """The quick brown fox jumps over the lazy dog. `name` is not in it."""
    subject, target = (_creature(rng, taken) for _ in range(2))
    verb = rng.choice(w.MOVES)
    sentence = f"The {subject} {verb} the {target}."
    base = _infinitive(verb)
    return Fact(
        sentence,
        (
            (f"Who {verb} the {target}?", sentence),
            (f"What does the {subject} do?", sentence),
            (f"Whom does the {subject} {base}?", sentence),
        ),
    )


def _event(rng: Random, name: str, taken: set[str]) -> Fact:
    """Times, prices and numbers of things. `name` is not in it."""
    thing = _fresh(
        rng, ["meeting", "film", "concert", "lesson", "party", "train", "match", "show", "exam"], taken
    )
    draw = rng.random()
    if draw < 0.35:
        sentence = f"The {thing} starts at {rng.randint(0, 23)}:{rng.choice(('00', '15', '30', '45'))}."
        return Fact(sentence, ((f"When does the {thing} start?", sentence),))
    if draw < 0.6:
        sentence = f"The {thing} is on {rng.choice(w.WEEKDAYS)}."
        return Fact(
            sentence, ((f"When is the {thing}?", sentence), (f"On which day is the {thing}?", sentence))
        )
    if draw < 0.8:
        sentence = f"The {thing} is in room {rng.randint(1, 999)}."
        return Fact(
            sentence, ((f"Where is the {thing}?", sentence), (f"In which room is the {thing}?", sentence))
        )
    item = _fresh(rng, w.OBJECTS, taken)
    sentence = f"The {item} costs {rng.randint(1, 500)} euros."
    return Fact(
        sentence, ((f"How much does the {item} cost?", sentence), (f"What does the {item} cost?", sentence))
    )


def _code(rng: Random, name: str, taken: set[str]) -> Fact:
    """Something that only this text knows. `name` is not in it."""
    what = _fresh(
        rng, ["password", "secret word", "code", "magic word", "answer", "key word", "signal"], taken
    )
    value = rng.choice((w.made_up(rng), w.made_up(rng), str(rng.randint(100, 99999)), rng.choice(w.WORDS)))
    sentence = f"The {what} is {value}."
    return Fact(sentence, ((f"What is the {what}?", sentence),))


KINDS: Final = (
    _location,
    _location,
    _moved,
    _possession,
    _possession,
    _job,
    _taste,
    _age,
    _home,
    _friend,
    _scene,
)
NAMELESS: Final = (_scene, _event, _code)

FRAMES: Final = (
    "{text}\n\n{question}", "{text}\n\n{question}", "{text} {question}", "{text}\n{question}",
    "Text: {text}\n\nQuestion: {question}", "Read the text and answer the question.\n\n{text}\n\n{question}",
    "{question}\n\n{text}", "{question}\n\nText: {text}", "Here is a text:\n{text}\n\n{question}",
    "Answer from this text: {text}\n\n{question}", "Text:\n\"{text}\"\n\nQuestion: {question}",
    "According to the text, answer the question.\nText: {text}\nQuestion: {question}",
)  # fmt: skip


def reading(rng: Random, name_of: NameOf = w.name, longest: int = 80) -> Example:
    most = 8 if rng.random() < 0.92 else longest  # some fill a good part of the context
    facts = list(_facts(rng, rng.randint(1, most), name_of))
    text = _text(rng, facts)
    if rng.random() < 0.1:
        question, thought, answer = _missing(rng, text, name_of)
    else:
        question, thought, answer = _question(rng, facts)
    example = ask(rng.choice(FRAMES).format(text=text, question=question), thought, answer)
    return _asked_again(rng, example, facts) if rng.random() < 0.25 else example


def _facts(rng: Random, count: int, name_of: NameOf) -> Iterator[Fact]:
    """About one thing each, with nothing in common, so that every question has one answer."""
    taken: set[str] = set()
    for _ in range(count):
        name = name_of(rng)
        while name in taken:
            name = name_of(rng)
        taken.add(name)
        kind = rng.choice(NAMELESS if rng.random() < 0.2 else KINDS)
        yield kind(rng, name, taken)


def _text(rng: Random, facts: list[Fact]) -> str:
    return rng.choice((" ", " ", " ", "\n")).join(fact.sentence for fact in facts)


def _question(rng: Random, facts: list[Fact]) -> tuple[str, str, str]:
    """Question, thought, answer."""
    fact = rng.choice(facts)
    questions = fact.questions
    if rng.random() < 0.4:  # the harder ones: what is known stands behind what is asked for
        questions = tuple(pair for pair in questions if pair[0].startswith("Who ")) or questions
    question, answer = rng.choice(questions)
    return question, f'The text says: "{fact.sentence}"', answer


def _missing(rng: Random, text: str, name_of: NameOf) -> tuple[str, str, str]:
    """A question about somebody who is not in the text."""
    name = name_of(rng)
    while name in text:
        name = name_of(rng)
    (fact,) = (rng.choice(KINDS[:-1])(rng, name, set()) for _ in range(1))
    question = next(question for question, _ in fact.questions if name in question)
    return question, f"The text says nothing about {name}.", UNKNOWN


def _asked_again(rng: Random, first: Example, facts: list[Fact]) -> Example:
    """Another question, two turns or more after the text."""
    earlier: list[Message] = [*first.messages, assistant(first.answer)]
    for _ in range(rng.randint(0, 1)):
        question, _, answer = _question(rng, facts)
        earlier += [user(question), assistant(answer)]
    question, thought, answer = _question(rng, facts)
    return ask(question, thought, answer).after(earlier)


def _creature(rng: Random, taken: set[str]) -> str:
    animal = _fresh(rng, w.ANIMALS, taken)
    return " ".join(
        [
            *rng.sample(w.ADJECTIVES, rng.choice((0, 1, 1))),
            *rng.sample(w.COLOURS, rng.choice((0, 0, 1))),
            animal,
        ]
    )


def _fresh(rng: Random, words: list[str], taken: set[str]) -> str:
    word = w.made_up(rng) if words is w.OBJECTS and rng.random() < 0.1 else rng.choice(words)
    while word in taken:  # nearly all are, in a long text
        word = rng.choice(words) if rng.random() < 0.9 else w.made_up(rng)
    taken.add(word)
    return word


def _infinitive(verb: str) -> str:
    first, _, rest = verb.partition(" ")
    for ending, base in (("ches", "ch"), ("shes", "sh"), ("ries", "ry")):
        if first.endswith(ending):
            first = first.removesuffix(ending) + base
            break
    else:
        first = first.removesuffix("s")
    return f"{first} {rest}".rstrip()
