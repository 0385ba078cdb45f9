"""Spans of embeddings whose rows see one another: no row of a plan ends within one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from moeserve.messages.schema import GenerateRequest, RequestError
from moeserve.messages.steps import CONTINUES, StepPlan
from moeserve.router.core.limits import Limits
from tests.support.pictures.prompt_spans import TEXT, ask, cached, live_on, span
from tests.support.router.router_world import World


class WholeWorld(World):
    """Fails for a row that ends within a span of its request."""

    def __init__(self, **limits: object) -> None:
        usual: dict[str, object] = {
            "num_kv_slots": 1000,
            "max_num_seqs": 8,
            "max_model_len": 500,
            "max_num_batched_tokens": 16,
            "max_num_queued_reqs": 100,
            "embedding_bytes": 256,
            "whole_spans": True,
        }
        super().__init__(Limits(**(usual | limits)))  # type: ignore[arg-type]
        self.chunks: list[tuple[int, int]] = []  # of all plans: start and count
        self._bound: dict[int, list[tuple[int, int]]] = {}  # by request slot, its spans

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            self._bound |= {
                seq.req_slot: [(one.start, one.end) for one in seq.spans] for seq in plan.new_seqs
            }
            for row in plan.rows:
                self.chunks.append((row.start, row.count))
                end = row.start + row.count
                assert row.start == CONTINUES or not any(
                    first < end < behind for first, behind in self._bound[row.req_slot]
                ), (row.start, row.count, self._bound[row.req_slot])
        return plan

    def ask(self, message: GenerateRequest) -> list[tuple[int, int]]:
        """Serves it alone. Returns its prompt's chunks."""
        self.chunks = []
        self.add(message)
        self.run()
        return [chunk for chunk in self.chunks if chunk[0] < len(message.token_ids) // 4]


def test_chunks_end_before_a_span_or_behind_it() -> None:
    world = WholeWorld(reuse_prefixes=False)
    assert world.ask(ask(1, TEXT, span(4, 8))) == [(0, 16), (16, 16), (32, 8)]
    assert world.ask(ask(2, TEXT, span(10, 12))) == [(0, 10), (10, 16), (26, 14)]
    assert world.ask(ask(3, TEXT, span(10, 16))) == [(0, 10), (10, 16), (26, 14)]  # as many as a step has
    assert world.ask(ask(4, TEXT, span(0, 10), span(10, 10))) == [(0, 10), (10, 16), (26, 14)]
    assert world.ask(ask(5, TEXT, span(24, 16))) == [(0, 16), (16, 8), (24, 16)]
    world.check_all_free()


def test_a_span_waits_for_a_step_with_room() -> None:
    """Beside decoding requests, whose rows take room; those behind it wait as well."""
    world = WholeWorld(max_num_batched_tokens=12)
    for id in range(3):
        world.add(ask(id, TEXT[: 4 + id], max_tokens=9))
        world.plan()
        world.result()
    world.add(ask(8, TEXT, span(2, 12)))
    world.add(ask(9, TEXT[:20], max_tokens=2))
    world.run()
    assert all(not isinstance(seen.final, RequestError) for seen in world.seen.values())
    assert (2, 12) in world.chunks
    world.check_all_free()


def test_a_prefix_that_ends_within_a_span_is_continued_there() -> None:
    """Its KV has been computed with the whole span, so that of the rest alone may be computed again."""
    world = WholeWorld()
    message = ask(1, TEXT[:20], span(6, 14), max_tokens=1)  # the prompt's last token is always computed
    assert world.ask(message) == [(0, 6), (6, 14)]
    assert world.ask(ask(2, TEXT[:20], span(6, 14), max_tokens=1)) == [(19, 1)]
    assert cached(world, 2) == 19


@pytest.mark.parametrize("limits", [{}, {"num_window_slots": 300, "window": 5}, {"max_drafts": 3}])
def test_random_lives(limits: dict[str, object]) -> None:
    hits = 0
    for seed in range(6):
        rng = random.Random(seed)
        world = WholeWorld(num_kv_slots=120, max_num_seqs=4, event_block_size=4, **limits)
        for id in range(40):
            places = sorted(rng.sample(range(26), 2 * rng.randint(1, 2)))
            spans = [
                span(first, behind - first, f"{rng.choice(['cat', 'dog'])} {behind - first}")
                for first, behind in list(pairwise(places))[::2]
                if behind - first <= 16
            ]
            live_on(world, rng, id, spans)
        world.run()
        hits += world.scheduler.load_report().cached_tokens
        world.check_all_free()
    assert hits > 100
