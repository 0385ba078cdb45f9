"""Short stories with a pattern: who, where, what was found, who helped, how it ended."""

from __future__ import annotations

from random import Random
from typing import Final

from training.text import words as w
from training.text.example import Example, ask, casual

ASKED: Final = (
    "Tell me a story about {a}.", "Tell me a short story about {a}.", "Write a story about {a}.", "A story about {a}, please.",
    "Can you tell me a story about {a}?", "I want to hear a story about {a}.", "Make up a story about {a}.",
    "Write a short story about {a}.", "Once upon a time there was {a}. What happened?",
)  # fmt: skip
ASKED_PLAINLY: Final = (
    "Tell me a story.", "Tell me a short story.", "Write a story.", "Do you know a story?", "Tell me another story.",
    "Can you tell me a bedtime story?", "I am bored. Tell me something.", "One more story.", "Tell me a fairy tale.",
)  # fmt: skip
OPENINGS: Final = (
    "Once upon a time there was {adj_a} {animal} named {name}.",
    "There once was {adj_a} {animal} called {name}.",
    "Long ago, {adj_a} {animal} named {name} lived near a {place}.",
    "{name} was {adj_a} {animal}.",
)
MIDDLES: Final = (
    (
        "One day {name} went to the {place} to look for a {thing}.",
        "One morning {name} lost a {colour} {thing}.",
    ),
    (
        "On the way {name} met {adj2_a} {animal2}.",
        "Behind a tree {name} saw {adj2_a} {animal2}.",
        "Then {adj2_a} {animal2} came by.",
    ),
    (
        '"Can you help me?" asked {name}.',
        '"Where are you going?" asked the {animal2}. "I am looking for a {thing}," said {name}.',
        '"Why are you so {adj}?" asked the {animal2}. "I have no {thing}," said {name}.',
    ),
    (
        "Together they looked in the {place2}.",
        "They walked to the {place2} and looked everywhere.",
        "The {animal2} thought for a while and pointed to the {place2}.",
    ),
    (
        "There they found the {colour} {thing}.",
        "Under a stone lay the {colour} {thing}.",
        "And there it was: a {colour} {thing}.",
    ),
)
ENDINGS: Final = (
    "From that day on {name} and the {animal2} were friends.",
    "{name} was happy and thanked the {animal2}.",
    "They went home together and ate {food}. The end.",
    "And {name} was never {adj} again.",
)


def story(rng: Random) -> Example:
    values = _values(rng)
    text = tell(rng, values)
    if rng.random() < 0.35:
        question = rng.choice(ASKED_PLAINLY)
        wish = "The user wants a story."
    else:
        hero = (
            w.a(values["animal"]) if rng.random() < 0.6 else f"{w.a(values['animal'])} named {values['name']}"
        )
        question = rng.choice(ASKED).format(a=hero)
        wish = f"The user wants a story about {hero}."
    return ask(casual(rng, question), wish, text)


def tell(rng: Random, values: dict[str, str] | None = None) -> str:
    values = values or _values(rng)
    sentences = [rng.choice(part) for part in (OPENINGS, *MIDDLES, ENDINGS)]
    return " ".join(sentence.format(**values) for sentence in sentences)


def _values(rng: Random) -> dict[str, str]:
    adj, adj2 = rng.sample(w.ADJECTIVES, 2)
    animal, animal2 = rng.sample(w.ANIMALS, 2)
    place, place2 = rng.sample(w.ROOMS, 2)
    return {
        "name": w.name(rng), "adj": adj, "adj_a": w.a(adj), "animal": animal, "adj2_a": w.a(adj2), "animal2": animal2,
        "place": place, "place2": place2, "thing": rng.choice(w.OBJECTS), "colour": rng.choice(w.COLOURS),
        "food": rng.choice(w.FOODS),
    }  # fmt: skip
