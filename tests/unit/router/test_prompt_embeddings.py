"""Embeddings in place of tokens, as the router sees them: what is refused, what shares KV, what the worker is told."""

from __future__ import annotations

import random
from array import array

import msgspec
import pytest

from moeserve.messages.beams import BeamParams
from moeserve.messages.kv_events import BlockStored
from moeserve.messages.prompt_embeddings import MOST_BYTES, MOST_SPANS, EmbeddingSpan
from moeserve.messages.schema import GenerateRequest, RequestError, Resumed
from moeserve.messages.steps import NewSeq, StepPlan
from moeserve.router.core.limits import Limits
from moeserve.router.core.memory import embedding_numbers
from moeserve.router.core.memory.embedding_numbers import EmbeddingNumbers
from moeserve.router.core.memory.radix_node import Namespace
from moeserve.router.core.memory.snapshot_points import SnapshotSpacing
from moeserve.router.core.policy.preemption import PREEMPTIBLE
from moeserve.router.core.tiers.page_keys import page_keys
from tests.support.pictures.prompt_spans import PLACEHOLDER, TEXT, ask, cached, live_on, span
from tests.support.router.router_world import World, request

ROW = 256  # bytes of an embedding
SHARED: Namespace = ("", "")


def world_of(**limits: object) -> World:
    usual: dict[str, object] = {
        "num_kv_slots": 1000,
        "max_num_seqs": 8,
        "max_model_len": 500,
        "max_num_batched_tokens": 64,
        "max_num_queued_reqs": 100,
        "embedding_bytes": ROW,
    }
    return World(Limits(**(usual | limits)))  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is refused

GOOD = span(4, 8)
change = msgspec.structs.replace
FAULTS = {
    "sorted": [span(20, 4), span(4, 4)],
    "overlap": [span(4, 8), span(11, 4)],
    "lie within": [span(36, 5)],
    "lie within the 40": [span(-1, 4)],
    "of 0 embeddings": [span(4, 0)],
    "does not fit": [span(4, 1 << 40)],
    "at most 512 spans": [span(at, 1) for at in range(MOST_SPANS + 1)],
    "32 bytes, not 31": [change(GOOD, sha256=bytes(31))],
    "hexadecimal": [change(GOOD, handle="../config.json")],
    "1 to 64": [change(GOOD, handle="")],
    "positions of their own": [change(GOOD, positions=array("i", range(24)).tobytes())],
}


@pytest.mark.parametrize("cause", FAULTS)
def test_what_cannot_be_computed_is_refused(cause: str) -> None:
    world = world_of(max_model_len=1000)
    message = request(1, [*range(40), *range(1000, 1600)] if "512" in cause else 40, 4)
    world.add(msgspec.structs.replace(message, spans=FAULTS[cause]))
    final = world.seen[1].final
    assert isinstance(final, RequestError)
    assert final.status == 400
    assert cause in final.message
    world.check_all_free()


def test_more_bytes_than_a_prompt_may_have() -> None:
    world = world_of(embedding_bytes=MOST_BYTES // 16, max_model_len=1000)
    for id, count in enumerate((16, 17)):
        world.add(ask(id, TEXT, span(4, count)))
    assert not isinstance(world.seen[0].final, RequestError)
    assert isinstance(world.seen[1].final, RequestError)
    assert "bytes" in world.seen[1].final.message


def test_what_does_not_go_with_embeddings_is_refused_by_name() -> None:
    good = ask(1, TEXT, GOOD)
    scored = change(good, sampling=change(good.sampling, prompt_logprobs=1))
    beams = change(good, beams=BeamParams(1, 0, 2, 2))
    for message, limits, cause in (
        (good, {"embedding_bytes": 0}, "neither several GPUs nor"),
        (scored, {}, "prompt logprobs"),
        (beams, {}, "beam search"),
        (
            ask(1, TEXT, span(4, 20)),
            {"whole_spans": True, "max_num_batched_tokens": 19},
            "20 tokens is more than a step's 19",
        ),
    ):
        world = world_of(**limits)
        world.add(message)
        final = world.seen[1].final
        assert isinstance(final, RequestError), cause
        assert final.status == 400
        assert cause in final.message
        world.check_all_free()


# ---------------------------------------------------------------- what shares KV


def test_the_same_content_shares_and_another_does_not() -> None:
    world = world_of()
    asked = [
        (span(10, 20), 0),
        (span(10, 20, "dog", "bb"), 10),  # the same ids
        (span(10, 20, handle="cc"), 39),  # the same content, of another file
        (span(10, 19, "cat of 19"), 10),
        (span(10, 20, "dog"), 39),
    ]
    for id, (one, expected) in enumerate(asked):
        world.add(ask(id, TEXT, one))
        world.run()
        assert cached(world, id) == expected, id
    world.add(request(9, [PLACEHOLDER if 10 <= at < 30 else token for at, token in enumerate(TEXT)], 4))
    world.run()
    assert cached(world, 9) == 10, "the placeholders themselves are other tokens"
    world.check_all_free()


def test_positions_of_their_own_are_part_of_the_content() -> None:
    plain, moved = GOOD, change(GOOD, positions=bytes(12 * 8))
    assert len({plain.key, moved.key, change(moved, count=9).key, span(4, 8, "dog").key}) == 4
    assert change(GOOD, start=9, handle="ff").key == GOOD.key


def test_a_prompt_may_depart_within_a_span() -> None:
    """The span has one content, whose first positions are cached: a shorter prompt's last token is always computed."""
    world = world_of(max_num_batched_tokens=16)
    world.add(ask(1, TEXT[:30], span(10, 20)))
    world.run()
    world.add(ask(2, TEXT, span(10, 20)))
    world.run()
    assert cached(world, 2) == 30
    world.check_all_free()


# ---------------------------------------------------------------- what the worker is told


def bindings(world: World, id: int) -> list[NewSeq]:
    """Plans until nothing is left; the NewSeqs of a request."""
    found: list[NewSeq] = []
    plan: StepPlan | None
    while True:
        while (plan := world.plan()) is not None:
            found += [seq for seq in plan.new_seqs if seq.sampling.seed == id]
        if not world.in_flight:
            return found
        world.result()


def test_a_binding_has_the_spans_that_are_not_cached() -> None:
    world = world_of(max_num_batched_tokens=16)
    first, second = span(4, 8), span(14, 20, "dog", "bb")
    (bound,) = bindings_of(world, ask(1, TEXT, first, second))
    assert bound.spans == [first, second]
    tokens = array("i", bound.token_ids)
    assert all((token < 0) == (4 <= at < 12 or 14 <= at < 34) for at, token in enumerate(tokens))
    (bound,) = bindings_of(world, ask(2, [*TEXT[:13], 9, *TEXT[14:]], first, second))
    assert bound.spans == [second]


def bindings_of(world: World, message: GenerateRequest) -> list[NewSeq]:
    world.add(message)
    return bindings(world, message.id)


@pytest.mark.parametrize("kind", ["preempted", "lost"])
def test_who_is_bound_again_has_its_embeddings_again(kind: str) -> None:
    world = world_of(max_num_batched_tokens=16, reuse_prefixes=False)
    world.add(ask(1, TEXT, span(4, 30)))
    world.plan()
    world.result()
    if kind == "lost":
        world.lose_worker()
        world.find_worker(crashed_by_itself=False)
    else:
        batch = world.scheduler._batch
        (one,) = (one for one in batch.running.values() if one.state in PREEMPTIBLE)
        batch.preempt(one)
    (bound,) = bindings(world, 1)
    assert bound.spans == [span(4, 30)]
    world.check_all_free()


def test_who_comes_again_after_a_lost_router_has_its_embeddings() -> None:
    """Another router's numbers, and the answer so far behind the prompt."""
    world = world_of()
    world.add(ask(1, TEXT, span(0, 3, "dog", "bb")))
    world.run()
    said = array("i", [100, 101])
    message = change(ask(2, TEXT, GOOD), resumed=Resumed(said.tobytes(), 0, None, 1.0))
    (bound,) = bindings_of(world, message)
    assert bound.spans == [GOOD]
    tokens = array("i", bound.token_ids)
    assert tokens[len(TEXT) :] == said
    assert all((token < 0) == (4 <= at < 12) for at, token in enumerate(tokens))
    world.check_all_free()


# ---------------------------------------------------------------- files


def test_a_handle_is_free_when_no_plan_may_name_it() -> None:
    world = world_of(max_num_batched_tokens=16)
    world.add(ask(1, TEXT, span(4, 8, handle="aa"), span(20, 8, "dog", "bb")))
    world.add(ask(2, TEXT, span(4, 8, handle="cc")))
    world.plan()
    world.plan()
    world.abort(1)
    assert world.scheduler.take_handles() == [], "the plans in flight may bind it"
    world.result()
    world.result()
    assert world.scheduler.take_handles() == ["aa", "bb"]
    world.run()
    assert world.scheduler.take_handles() == ["cc"]
    world.add(ask(3, TEXT, span(4, 8, handle="dd")))
    world.plan()
    world.abort(3)
    world.lose_worker()
    assert world.scheduler.take_handles() == ["dd"], "the plans in flight are lost"
    world.scheduler.close("the end")
    world.add(ask(4, TEXT, span(4, 8, handle="ee")))
    assert world.scheduler.take_handles() == ["ee"], "it was refused"


# ---------------------------------------------------------------- what leaves the process


def numbered(before: int, *spans: EmbeddingSpan) -> tuple[EmbeddingNumbers, bytes]:
    """Numbers of a router that had `before` other spans, and TEXT's tokens with these."""
    numbers = EmbeddingNumbers(list)
    for other in range(before):
        numbers.name(array("i", [0]), [span(0, 1, f"other {other}")])
    tokens = array("i", TEXT)
    numbers.name(tokens, spans)
    return numbers, tokens.tobytes()


def test_keys_of_pages_are_of_the_content_alone() -> None:
    """Whatever numbers a router has given: another finds the pages on disk."""

    def keys(before: int, *spans: EmbeddingSpan) -> list[bytes]:
        numbers, tokens = numbered(before, *spans)
        return page_keys(SHARED, tokens, 4, numbers)

    cat = keys(0, span(6, 12))
    assert keys(5, span(6, 12)) == cat
    dog = keys(0, span(6, 12, "dog"))
    assert [a == b for a, b in zip(cat, dog, strict=True)] == [True] + 9 * [False]
    assert keys(0) == page_keys(SHARED, array("i", TEXT).tobytes(), 4), "text has the keys that it had"
    # The same ids and keys in a page, and another place of what stands behind.
    twice = keys(0, span(4, 2), span(6, 2))
    once = keys(0, span(4, 2))
    assert twice[1] != once[1]
    assert keys(0, span(4, 2), span(6, 2, "dog"))[1] != keys(0, span(4, 2, "dog"), span(6, 2))[1]


def test_kv_events_have_placeholders_and_keys() -> None:
    def stored(*asked: GenerateRequest) -> BlockStored:
        world = world_of(event_block_size=8)
        for message in asked:
            world.add(message)
            world.run()
        events = [event for event in world.scheduler.take_kv_events() if isinstance(event, BlockStored)]
        return events[-1]

    one = span(10, 20)
    alone = stored(ask(1, TEXT, one))
    assert alone.token_ids[10:30] == [PLACEHOLDER] * 20
    assert alone.extra_keys == [None, *[(one.key.hex(),)] * 3, None]
    behind = stored(ask(1, [9] * 40, span(10, 20, "dog")), ask(2, TEXT, one))
    assert behind.block_hashes == alone.block_hashes, "the same on every server"
    other = stored(ask(1, TEXT, span(10, 20, "dog")))
    assert [a == b for a, b in zip(alone.block_hashes, other.block_hashes, strict=True)] == [True] + 4 * [
        False
    ]


# ---------------------------------------------------------------- numbers


def test_numbers_are_forgotten_when_nothing_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_numbers, "MOST_IDLE", 4)
    kept: list[bytes] = []
    numbers = EmbeddingNumbers(lambda: kept)
    given: dict[str, int] = {}
    for at in range(40):
        tokens = array("i", [0] * 3)
        numbers.name(tokens, [span(0, 3, str(at))])
        assert tokens[0] == tokens[2] < -1
        given[str(at)] = tokens[0]
        if at == 3:
            kept.append(tokens.tobytes())
        if at != 5:  # an open request
            numbers.leave(tokens, [span(0, 3, str(at))])
    assert len(set(given.values())) == 40, "none is given twice"
    assert len(numbers) < 14
    for known in ("3", "5"):
        tokens = array("i", [0] * 3)
        numbers.name(tokens, [span(0, 3, known)])
        assert tokens[0] == given[known]
    assert numbers.keys_in(kept[0]) == [span(0, 3, "3").key]


SNAPSHOTS = {"num_state_slots": 20, "snapshot_spacing": SnapshotSpacing(tail=2, least=2, first=4)}


@pytest.mark.parametrize("limits", [{}, SNAPSHOTS, {"num_window_slots": 300, "window": 5}])
def test_random_lives(limits: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The checking worker finds that every slot that is read holds what is read: numbers stand for contents."""
    monkeypatch.setattr(embedding_numbers, "MOST_IDLE", 2)
    hits = 0
    for seed in range(6):
        rng = random.Random(seed)
        world = world_of(
            num_kv_slots=120, max_num_seqs=4, max_num_batched_tokens=16, event_block_size=4, **limits
        )
        for id in range(40):
            count, start = rng.randint(1, 12), rng.randint(0, 4)
            spans = [span(start, count, rng.choice(["cat", "dog", "cow"]) + str(count))]
            if rng.random() < 0.5:
                spans.append(span(start + count, 6, rng.choice(["cat", "dog"]) + "6"))
            live_on(world, rng, id, spans)
        world.run()
        hits += world.scheduler.load_report().cached_tokens
        assert len(world.scheduler.take_handles()) >= 40
        world.check_all_free()
    assert hits > 100
