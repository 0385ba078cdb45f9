"""Random lives of a router: whatever comes, nothing leaks, nothing hangs, nobody is forgotten."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.messages.schema import CloseText, RequestError, TokensItem
from moeserve.router.core.limits import Limits
from tests.unit.router_world import STOP_TOKEN, World, request

LIMITS = st.builds(
    Limits,
    num_kv_slots=st.integers(12, 48),
    max_num_seqs=st.integers(1, 6),
    max_model_len=st.integers(12, 40),
    max_num_batched_tokens=st.integers(1, 12),
    max_num_queued_reqs=st.sampled_from([2, 100]),
)
TOKEN = st.sampled_from([7, 7, 7, 7, 7, STOP_TOKEN, -1])
ADD = st.tuples(
    st.just("add"),
    st.integers(1, 16),  # prompt
    st.integers(0, 16),  # max_tokens
    st.integers(-1, 1),  # priority
    st.integers(0, 3),  # min_tokens
    st.booleans(),  # prompt_logprobs
    st.lists(TOKEN, max_size=6),  # the first tokens; ordinary ones follow
)
PICK = st.integers(0, 15)  # a request, seen or not
EVENT = st.one_of(
    ADD,
    ADD,
    st.tuples(st.just("plan")),
    st.tuples(st.just("result")),
    st.tuples(st.just("turn")),  # as the manager does it: every plan there is, then one result
    st.tuples(st.just("abort"), PICK),
    st.tuples(st.just("stop"), PICK, st.integers(0, 8)),
)


def apply(world: World, event: tuple) -> None:
    match event:
        case ("plan",):
            world.plan()
        case ("result",):
            world.result()
        case ("turn",):
            while world.plan() is not None:
                pass
            world.result()
        case ("abort", id, *_):
            world.abort(id)
        case ("stop", id, num_tokens):
            world.stop_hit(id, num_tokens)


def expected_tokens(message, script: list[int]) -> tuple[list[int], str]:
    """The client's tokens and the end, from the request and the worker's script alone."""
    tokens: list[int] = []
    for index in range(message.sampling.max_tokens):
        token = script[index] if index < len(script) else 100 + index
        if token < 0:
            return tokens, "error"
        if token == STOP_TOKEN and index >= message.sampling.min_tokens:
            return tokens, "stop"
        tokens.append(token)
    return tokens, "length"


def check_endings(world: World, added: dict, touched: set[int], died: bool) -> None:
    for id, (message, script) in added.items():
        seen = world.seen[id]
        tokens, reason = expected_tokens(message, script)
        assert seen.final is not None, f"request {id} was forgotten"
        if not seen.opened:
            assert isinstance(seen.final, RequestError)
            assert seen.final.status in (400, 503)
            continue
        assert seen.tokens == tokens[: len(seen.tokens)]
        if isinstance(seen.final, CloseText):
            assert id in touched
        elif isinstance(seen.final, RequestError):
            assert (seen.final.status == 503 and died) or (seen.final.status == 500 and reason == "error")
        elif id not in touched:
            check_complete(seen.final, seen, message, tokens, reason)


def check_complete(final: TokensItem, seen, message, tokens: list[int], reason: str) -> None:
    assert seen.tokens == tokens
    assert final.finish_reason == reason
    assert final.stop_token == (STOP_TOKEN if reason == "stop" else None)
    assert final.usage.completion_tokens == len(tokens) + (reason == "stop")
    if message.sampling.prompt_logprobs is not None:
        assert seen.prompt_logprobs == list(range(1, len(message.token_ids) // 4))


def live(limits: Limits, events: Iterable[tuple], dies: bool) -> None:
    """One life of a router, checked after every event and at its end."""
    world = World(limits)
    added: dict = {}
    touched: set[int] = set()
    for event in events:
        next_id = len(added)
        if event[0] == "add":
            sampling = {"min_tokens": event[4], "prompt_logprobs": 0 if event[5] else None}
            added[next_id] = (request(next_id, event[1], event[2], priority=event[3], **sampling), event[6])
            world.add(*added[next_id])
        elif event[0] in ("abort", "stop"):
            touched.add(event[1])
        apply(world, event)
        world.check()
    if dies:
        world.die()
        world.check()
        assert world.plan() is None
    world.run()
    check_endings(world, added, touched, dies)
    world.check_all_free()


@settings(max_examples=1500, deadline=None)
@given(limits=LIMITS, events=st.lists(EVENT, min_size=10, max_size=60), dies=st.booleans())
def test_random_lives(limits: Limits, events: list[tuple], dies: bool) -> None:
    live(limits, events, dies)


def crowded_events(rng: random.Random, count: int) -> Iterator[tuple]:
    """Mostly arrivals and steps, so that the pool is always short: deeper than hypothesis likes to go."""
    for _ in range(count):
        kind = rng.choices(["add", "turn", "result", "plan", "abort", "stop"], [3, 5, 1, 1, 0.3, 0.3])[0]
        if kind == "add":
            script = [rng.choice([7, 7, 7, 7, 7, 7, STOP_TOKEN, -1]) for _ in range(rng.randrange(12))]
            sizes = rng.randint(1, 16), rng.randint(0, 16)
            yield ("add", *sizes, rng.randint(-1, 1), rng.randint(0, 3), rng.random() < 0.2, script)
        elif kind in ("abort", "stop"):
            yield (kind, rng.randrange(40), rng.randrange(8))
        else:
            yield (kind,)


@pytest.mark.parametrize("block", range(4))
def test_crowded_lives(block: int) -> None:
    for seed in range(block * 500, (block + 1) * 500):
        rng = random.Random(seed)
        limits = Limits(
            num_kv_slots=rng.randint(24, 64),
            max_num_seqs=rng.randint(1, 8),
            max_model_len=32,
            max_num_batched_tokens=rng.randint(1, 16),
            max_num_queued_reqs=100,
        )
        try:
            live(limits, crowded_events(rng, 120), dies=seed % 8 == 0)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
