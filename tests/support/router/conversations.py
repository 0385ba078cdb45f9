"""Conversations with a router whose worker computes nothing."""

from __future__ import annotations

import random

import pytest

from tests.support.router.checking_worker import STOP_TOKEN
from tests.support.router.router_world import World, final_item, request

GENERATION_PROMPT = [1, 2, 3]  # <|im_start|>assistant and a line break
OPEN_REASONING = [4, 3]  # <think> and a line break
END_OF_TURN = STOP_TOKEN


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000, 150_000) for _ in range(length)]


def cached(world: World, id: int) -> int:
    usage = final_item(world, id).usage
    assert usage is not None
    return usage.cached_tokens


def computed(world: World) -> int:
    """Positions computed since the last call."""
    before, world.worker.computed = world.worker.computed, 0
    return before


def ask(world: World, id: int, prompt: list[int], answer: list[int]) -> int:
    """Runs one request alone, which answers so and ends its turn; returns its cached tokens."""
    world.add(request(id, prompt, len(answer) + 10), [*answer, END_OF_TURN])
    world.run()
    world.check_all_free()
    return cached(world, id)


class Conversation:
    """As a chat template renders it: each turn's prompt ends with the generation prompt. `drops_reasoning`: answers are
    rendered without the thoughts that were generated, once the next turn begins."""

    def __init__(self, rng: random.Random, system: list[int], *, drops_reasoning: bool = False) -> None:
        self.rng = rng
        self.history = [*system]
        self.drops_reasoning = drops_reasoning
        self.prompt: list[int] = []
        self.answer: list[int] = []
        self.content: list[int] = []

    def ask(self, question: int = 40, content: int = 40, thoughts: int = 60) -> None:
        self.prompt = [*self.history, 1, 5, 3, *text(self.rng, question), END_OF_TURN, 3, *GENERATION_PROMPT]
        self.content = text(self.rng, content)
        self.answer = self.content
        if self.drops_reasoning:
            self.prompt += OPEN_REASONING
            self.answer = [*text(self.rng, thoughts), 6, 3, *self.content]

    def answered(self) -> None:
        end = len(self.prompt) - len(OPEN_REASONING) * self.drops_reasoning
        self.history = [*self.prompt[:end], *self.content, END_OF_TURN, 3]


def talk(world: World, *, drops_reasoning: bool, together: bool) -> float:
    """Eight conversations of ten turns, which all ask before any asks again; the share of the later turns' prompt
    tokens that is not computed again."""
    rng = random.Random(1)
    conversations = [Conversation(rng, text(rng, 1500), drops_reasoning=drops_reasoning) for _ in range(8)]
    prompts = hits = id = 0
    for turn in range(10):
        first = id
        for conversation in conversations:
            conversation.ask()
            script = [*conversation.answer, END_OF_TURN]
            world.add(request(id, conversation.prompt, len(script) + 10), script)
            id += 1
            if not together:
                world.run()
        world.run()
        world.check_all_free()
        for number, conversation in enumerate(conversations):
            conversation.answered()
            if turn:
                prompts += len(conversation.prompt)
                hits += cached(world, first + number)
    return hits / prompts


# How conversations are told: the reasoning of earlier turns is left out or not, and turns come together or not.
WAYS_TO_TALK = pytest.mark.parametrize(
    ("drops_reasoning", "together"),
    [
        (False, True),
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)


def edit_a_long_prompt(world: World) -> list[tuple[int, int]]:
    """A prompt of 20,000 tokens, then four times with another end. Returns the tokens that were edited, and those
    that were computed, of each."""
    rng = random.Random(4)
    prompt = text(rng, 20_000)
    ask(world, 0, prompt, [7])
    return [
        (edited, 20_000 - ask(world, id, [*prompt[:-edited], *text(rng, edited)], [7]))
        for id, edited in enumerate([200, 1000, 3000, 7000], start=1)
    ]


def ask_together(world: World, length: int) -> list[int]:
    """16 requests at once with a system prompt of this length. Returns their cached tokens, in order of size."""
    rng = random.Random(6)
    system = text(rng, length)
    for id in range(16):
        world.add(request(id, system + text(rng, 30), 3))
    world.run()
    world.check_all_free()
    return sorted(cached(world, id) for id in range(16))


def ask_beside_a_sharer(world: World, length: int) -> tuple[list[int], int]:
    """A request with the same system prompt as one that still runs. Returns the system prompt, and the tokens that the
    next turn of the second request finds."""
    rng = random.Random(7)
    system = text(rng, length)
    world.add(request(0, system + text(rng, 30), 200))
    for _ in range(4):
        world.plan()
        world.result()
    second = system + text(rng, 100)
    world.add(request(1, second, 5))
    while world.seen[1].final is None:
        world.plan()
        world.result()
        world.check()
    return system, ask(world, 2, [*second, *world.seen[1].tokens, *text(rng, 50)], [7])
