"""Beam searches on a scheduler and a runner in one process."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.messages.beams import BeamParams, EarlyStopping
from moeserve.messages.sampling import SamplingParams, TextOptions
from moeserve.messages.schema import GenerateRequest, RequestError, TokensItem, TokensOut
from moeserve.messages.worker import Worker
from moeserve.router.core.limits import Limits
from moeserve.router.core.scheduler import Scheduler

if TYPE_CHECKING:  # it needs torch, which unit tests do not have
    from tests.gpu.driver import Driver


@dataclass(frozen=True)
class Wanted:
    """A search, in the words of transformers' `generate`."""

    num_beams: int
    num_return_sequences: int = 1
    max_new_tokens: int = 8
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    min_new_tokens: int = 0
    eos_token_id: tuple[int, ...] = ()
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0


def requests(first_id: int, prompt: list[int], wanted: Wanted, **fields: object) -> list[GenerateRequest]:
    """One for each answer; the search's key is the first one's id."""
    sampling = SamplingParams(
        max_tokens=wanted.max_new_tokens,
        min_tokens=wanted.min_new_tokens,
        stop_token_ids=wanted.eos_token_id,
        logprobs=0,
        seed=first_id,
    )
    return [
        GenerateRequest(
            id=first_id + choice,
            token_ids=array("i", prompt).tobytes(),
            sampling=sampling,
            text=TextOptions(),
            arrival=float(first_id),
            beams=BeamParams(
                first_id,
                choice,
                wanted.num_return_sequences,
                wanted.num_beams,
                wanted.num_beam_groups,
                wanted.length_penalty,
                wanted.diversity_penalty,
                wanted.early_stopping,
            ),
            **fields,  # type: ignore[arg-type]
        )
        for choice in range(wanted.num_return_sequences)
    ]


def scheduler_of(worker: Worker) -> Scheduler:
    ready = worker.ready()
    return Scheduler(
        Limits(
            ready.num_kv_slots,
            ready.max_num_seqs,
            ready.max_model_len,
            ready.max_num_batched_tokens,
            max_num_queued_reqs=1000,
            num_experts=ready.num_experts,
            experts_per_token=ready.experts_per_token,
            num_state_slots=ready.num_state_slots,
            num_window_slots=ready.num_window_slots,
            window=ready.window,
        )
    )


def serve(
    scheduler: Scheduler, worker: Worker, messages: list[GenerateRequest]
) -> dict[int, list[TokensItem]]:
    """Everything that was sent of each request, until all have ended. Raises AssertionError for one that failed."""
    for message in messages:
        scheduler.add(message)
    items: dict[int, list[TokensItem]] = {message.id: [] for message in messages}
    while scheduler.num_open:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.step_result(worker.step(plan), 0.0)
        scheduler.check_slots()
        for out in scheduler.take_messages():
            assert not isinstance(out, RequestError), out.message
            for item in out.items if isinstance(out, TokensOut) else ():
                items[item.id].append(item)
    scheduler.check()
    return items


def answers(items: dict[int, list[TokensItem]]) -> list[tuple[list[int], float]]:
    """Tokens, the end token included, and score of each choice, in order of their ids."""
    found = []
    for _, (item,) in sorted(items.items()):
        assert item.score is not None
        end = [] if item.stop_token is None else [item.stop_token]
        found.append((item.token_ids + end, item.score))
    return found


def check_scores(
    driver: Driver, prompt: list[int], items: dict[int, list[TokensItem]], *, within: float
) -> None:
    """Each token of each answer is as likely as the driver's runner finds it where the whole answer is a prompt."""
    for (item,) in items.values():
        assert item.logprobs is not None
        scored = driver.score(0, prompt + item.token_ids, len(prompt))[len(prompt) - 1 :]
        for one, other in zip(item.logprobs, scored, strict=False):
            assert one.token_id == other.token_id
            assert abs(one.logprob - other.logprob) < within
