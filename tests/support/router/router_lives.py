"""Random lives of a router."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from hypothesis import strategies as st
from msgspec.structs import replace

from moeserve.messages.reasoning import EarlyEnd, Thinking
from moeserve.messages.schema import DetokenizeEnd, GenerateRequest, RequestError, TokensItem
from moeserve.messages.steps import StepResult
from moeserve.router.core.limits import Limits
from tests.support.router.checking_worker import STOP_TOKEN, ints
from tests.support.router.router_world import Seen, World, request
from tests.support.router.virtual_tiers import VirtualTiers

Event: TypeAlias = tuple[Any, ...]  # its kind, then what the kind needs: see EVENT
Added: TypeAlias = dict[int, tuple[GenerateRequest, list[int]]]  # by id: the request, the worker's script


# Every third request reasons until CLOSE comes.
CLOSE = 8
EARLY_END = EarlyEnd(Thinking(5, CLOSE, (6, CLOSE, 6), is_open=True), frozenset({STOP_TOKEN}))
TOKEN = st.sampled_from([7, 7, 7, 7, 7, CLOSE, STOP_TOKEN, -1])
ADD = st.tuples(
    st.just("add"),
    # The prompt: tokens of one of two stems that many requests share, then tokens of its own; how many of each.
    st.tuples(st.integers(0, 12), st.integers(0, 1), st.integers(0, 8)),
    st.integers(0, 16),  # max_tokens
    st.integers(-1, 1),  # priority
    st.integers(0, 3),  # min_tokens
    st.booleans(),  # prompt_logprobs
    st.lists(TOKEN, max_size=6),  # the first tokens; ordinary ones follow
    st.sampled_from(["", "", "a", "b", "c"]),  # API key
    st.sampled_from(["", "", "salt"]),
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
    st.tuples(st.just("lose")),
    st.tuples(st.just("back"), st.booleans()),
)


def message(id: int, event: Event) -> GenerateRequest:
    _, (shared, stem, own), max_tokens, priority, min_tokens, scored, _, key_name, salt = event
    tokens = [1000 * stem + i for i in range(shared)] + [100_000 + 100 * id + i for i in range(own)]
    wanted = request(
        id,
        tokens,
        max_tokens,
        priority=priority,
        key_name=key_name,
        cache_salt=salt,
        min_tokens=min_tokens,
        prompt_logprobs=0 if scored else None,
    )
    return wanted if id % 3 else replace(wanted, early_end=EARLY_END)


def apply(world: World, event: Event) -> None:
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
        case ("lose",) if not world.lost:
            world.lose_worker()
        case ("back", by_itself) if world.lost:
            world.find_worker(crashed_by_itself=by_itself)


def expected_tokens(message: GenerateRequest, script: list[int]) -> tuple[list[int], str]:
    """The client's tokens and the end, from the request and the worker's script alone."""
    tokens: list[int] = []
    while (index := len(tokens)) < (most := message.sampling.max_tokens):
        token = script[index] if index < len(script) else 100 + index
        if token < 0:
            return tokens, "error"
        is_stop = token == STOP_TOKEN and index >= message.sampling.min_tokens
        reasons = message.early_end is not None and CLOSE not in tokens
        if is_stop and reasons and index + 3 < most:
            tokens += EARLY_END.reasoning.ending
        elif is_stop:
            return tokens, "stop"
        else:
            tokens.append(token)
    return tokens, "length"


def check_endings(world: World, added: Added, touched: set[int], died: bool) -> None:
    for id, (message, script) in added.items():
        seen = world.seen[id]
        tokens, reason = expected_tokens(message, script)
        assert seen.final is not None, f"request {id} was forgotten"
        if not seen.opened:
            assert isinstance(seen.final, RequestError)
            assert seen.final.status in (400, 503)
            assert seen.final.status == 400 or seen.final.retry_after is not None
            continue
        assert seen.tokens == tokens[: len(seen.tokens)]
        if isinstance(seen.final, DetokenizeEnd):
            assert id in touched
        elif isinstance(seen.final, RequestError):
            is_blamed = (
                "times over this" in seen.final.message and world.scheduler.load_report().engine_losses > 1
            )
            failed = seen.final.status == 500 and (reason == "error" or is_blamed)
            assert failed or (seen.final.status == 503 and died)
        elif id not in touched:
            check_complete(seen.final, seen, message, tokens, reason)


def check_complete(
    final: TokensItem, seen: Seen, message: GenerateRequest, tokens: list[int], reason: str
) -> None:
    assert seen.tokens == tokens
    assert final.finish_reason == reason
    assert final.stop_token == (STOP_TOKEN if reason == "stop" else None)
    assert final.usage is not None
    assert final.usage.completion_tokens == len(tokens) + (reason == "stop")
    assert 0 <= final.usage.cached_tokens < final.usage.prompt_tokens
    if message.sampling.prompt_logprobs is not None:
        assert seen.prompt_logprobs == ints(message.token_ids)[1:]
        assert final.usage.cached_tokens == 0


def live(
    limits: Limits,
    events: Iterable[Event],
    dies: bool,
    check_every: int = 1,
    tiers: VirtualTiers | None = None,
) -> World:
    """One life of a router, checked after every event and at its end; the costly checks only at intervals."""
    times = random.Random(limits.num_kv_slots)

    def step_ms(result: StepResult) -> float:
        return times.choice([0.0, 1.0, 5.0, 150.0]) * (1 + len(result.sampled))

    world = World(limits, step_ms)
    if tiers is not None:
        world.worker.tiers = tiers
    added: Added = {}
    touched: set[int] = set()
    for number, event in enumerate(events):
        if event[0] == "add":
            id = len(added)
            added[id] = (message(id, event), event[6])
            world.add(*added[id])
        elif event[0] in ("abort", "stop"):
            touched.add(event[1])
        apply(world, event)
        world.check(slots=number % check_every == 0)
    if world.lost:
        world.find_worker()
    if dies:
        world.die()
        world.check()
        assert world.plan() is None
    world.run()
    check_endings(world, added, touched, dies)
    world.check_all_free()
    return world


def crowded_events(rng: random.Random, count: int, tenants: list[str], loses: float = 0.0) -> Iterator[Event]:
    """Mostly arrivals and steps, so that the pool is always short: deeper than hypothesis likes to go."""
    kinds, weights = ["add", "turn", "result", "plan", "abort", "stop"], [3, 5, 1, 1, 0.3, 0.3]
    kinds, weights = [*kinds, "lose", "back"], [*weights, loses, 3 * loses]
    for kind in rng.choices(kinds, weights, k=count):
        if kind == "add":
            script = [rng.choice([7, 7, 7, 7, 7, 7, CLOSE, STOP_TOKEN, -1]) for _ in range(rng.randrange(12))]
            prompt = rng.randint(0, 12), rng.randint(0, 1), rng.randint(0, 8)
            sampling = rng.randint(0, 16), rng.randint(-1, 1), rng.randint(0, 3), rng.random() < 0.2
            yield ("add", prompt, *sampling, script, rng.choice(tenants), rng.choice(["", "", "salt"]))
        elif kind in ("abort", "stop"):
            yield (kind, rng.randrange(40), rng.randrange(8))
        elif kind == "back":
            yield (kind, rng.random() < 0.5)
        else:
            yield (kind,)
