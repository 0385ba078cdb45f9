"""Beam search by the scheduler and the CPU's worker together, beside transformers' `generate` in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from moeserve.messages.beams import EarlyStopping
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.worker import Worker
from moeserve.router.core.beams.beam_search import BeamSearch
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.gpu.driver import small_config
from tests.support.models.hugging_face_model import read_model, write_family, write_model
from tests.support.models.rounded_kv import round_kv
from tests.support.worker.beams import Wanted, answers, requests, scheduler_of, serve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT = [1 + (37 * i * i + 11 * i) % 4000 for i in range(20)]
Answers = list[tuple[list[int], float]]


class Models(NamedTuple):
    truth: PreTrainedModel
    worker: Worker
    ends: tuple[int, ...]  # tokens that come in answers


def transformers_answers(model: Any, wanted: Wanted) -> Answers:
    from transformers import GenerationConfig

    config = GenerationConfig(  # type: ignore[no-untyped-call]
        num_beams=wanted.num_beams,
        num_return_sequences=wanted.num_return_sequences,
        max_new_tokens=wanted.max_new_tokens,
        min_new_tokens=wanted.min_new_tokens,
        length_penalty=wanted.length_penalty,
        early_stopping=wanted.early_stopping,
        eos_token_id=list(wanted.eos_token_id) or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    sequences = [row[len(PROMPT) :] for row in found.sequences.tolist()]
    return [
        (_until_end(tokens, wanted), score)
        for tokens, score in zip(sequences, found.sequences_scores.tolist(), strict=True)
    ]


def _until_end(tokens: list[int], wanted: Wanted) -> list[int]:
    ends = [
        i for i, token in enumerate(tokens) if token in wanted.eos_token_id and i >= wanted.min_new_tokens
    ]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "qwen3_next"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """Models with attention, with latent attention, and with recurrent layers beside attention."""
    folder = tmp_path_factory.mktemp("beams") / request.param
    if request.param == "qwen3_moe":
        write_model(folder, torch.float32)
    else:
        write_family(folder, request.param, torch.float32)
    with pytest.MonkeyPatch.context() as patched:
        truth = read_model(folder)
        round_kv(truth, patched)
        worker = load_cpu_runner(small_config(folder, device="cpu", threads=2), lambda *_: None)
        likely = transformers_answers(truth, Wanted(4, 4))
        ends = {likely[0][0][2], likely[1][0][4], likely[2][0][6]}
        yield Models(truth, worker, tuple(sorted(ends)))


def assert_alike(found: Answers, expected: Answers, wanted: Wanted) -> None:
    """The same tokens; the same scores, to 1e-4 for each token of an answer."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (tokens, score), (_, truth) in zip(found, expected, strict=True):
        assert score == pytest.approx(truth, abs=1e-4 * len(tokens) ** (1 - wanted.length_penalty))


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [
        *[(2, 1.0, False), (4, 0.0, True), (4, 2.0, "never"), (4, 1.0, "never")],
        *[(8, 1.0, False), (8, 1.0, True), (8, -0.5, "never")],
    ],
)
def test_finds_what_transformers_finds(
    models: Models, width: int, length_penalty: float, early_stopping: EarlyStopping
) -> None:
    wanted = Wanted(width, width, 8, length_penalty, early_stopping, 0, models.ends)
    found = answers(serve(scheduler_of(models.worker), models.worker, requests(1, PROMPT, wanted)))
    assert_alike(found, transformers_answers(models.truth, wanted), wanted)
    if length_penalty <= 0:
        assert any(len(tokens) < 8 for tokens, _ in found), "no answer has ended by itself"


@pytest.mark.parametrize("wanted", [Wanted(4, 2, 10), Wanted(3, 3, 6, min_new_tokens=4), Wanted(8, 1, 1)])
def test_without_an_early_end(models: Models, wanted: Wanted) -> None:
    found = answers(serve(scheduler_of(models.worker), models.worker, requests(1, PROMPT, wanted)))
    assert_alike(found, transformers_answers(models.truth, wanted), wanted)


def test_neighbours_and_chunks_change_nothing(models: Models) -> None:
    """Two searches and a prompt that is read beside them: bit-identical, whoever shares the steps."""
    first = Wanted(4, 4, 8, eos_token_id=models.ends)
    second = Wanted(3, 3, 7)
    alone = [
        answers(serve(scheduler_of(models.worker), models.worker, requests(1, PROMPT[:count], wanted)))
        for count, wanted in ((20, first), (13, second))
    ]
    together = serve(
        scheduler_of(models.worker),
        models.worker,
        [*requests(1, PROMPT, first), *requests(11, PROMPT[:13], second)],
    )
    assert answers({id: items for id, items in together.items() if id < 11}) == alone[0]
    assert answers({id: items for id, items in together.items() if id > 10}) == alone[1]


def test_groups_are_those_of_the_paper(models: Models) -> None:
    """Beside the rules of the search on the log-probabilities that transformers computes of whole sequences;
    tests/unit has the rules beside the paper's."""
    wanted = Wanted(6, 6, 6, eos_token_id=models.ends, num_beam_groups=3, diversity_penalty=0.8)
    (message, *_) = all_requests = requests(1, PROMPT, wanted)
    assert message.beams is not None
    it = BeamSearch(message.beams, message.sampling)
    beams = [list(PROMPT)]
    while beams:
        with torch.no_grad():
            logprobs = torch.log_softmax(models.truth(torch.tensor(beams)).logits[:, -1].float(), -1)
        top = logprobs.topk(it.num_candidates)
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        beams = [
            [*beams[row], token]
            for row, token in it.advance([TokenLogprob(0, 0.0, 1, *map(tuple, row)) for row in rows])
        ]
    expected = [([one.token_id for one in a.beam.logprobs()], a.score) for a in it.answers()]
    found = answers(serve(scheduler_of(models.worker), models.worker, all_requests))
    assert_alike(found, expected, wanted)
    firsts = {tokens[0] for tokens, _ in found}
    assert len(firsts) > 1


def test_logprobs_are_of_the_tokens(models: Models) -> None:
    """They add up to the score, as transformers computes them of the whole answer."""
    wanted = Wanted(4, 2, 6, length_penalty=0.0)
    for (item,) in serve(scheduler_of(models.worker), models.worker, requests(1, PROMPT, wanted)).values():
        assert item.logprobs is not None
        with torch.no_grad():
            logits = models.truth(torch.tensor([PROMPT + item.token_ids])).logits[0, len(PROMPT) - 1 :]
        logprobs = torch.log_softmax(logits.float(), -1)
        for position, one in enumerate(item.logprobs):
            row = logprobs[position]
            assert one.token_id == item.token_ids[position]
            assert one.logprob == pytest.approx(row[one.token_id].item(), abs=1e-3)
            assert one.rank == int((row > row[one.token_id]).sum()) + 1
        assert sum(one.logprob for one in item.logprobs) == pytest.approx(item.score, abs=1e-5)
