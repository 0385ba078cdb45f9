"""Prompts with embeddings in place of tokens, on a real worker. The embeddings are those of known tokens: so answers
and logprobs are those of the tokens, bit for bit, however the prompt is cut, cached, preempted or sent again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from msgspec.structs import replace

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.schema import GenerateRequest, TokensItem
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.router.core.policy.preemption import PREEMPTIBLE
from moeserve.worker.engines.cpu.engine import CpuEngine
from moeserve.worker.loading.cpu.load import CpuModel, build_cpu_runner
from moeserve.worker.runner import Runner
from tests.support.models.gemma_file import write_gemma
from tests.support.router.router_world import final_item, request
from tests.support.worker.real_time_world import RealTimeWorld
from tests.support.worker.served_answers import Answer, Told, load, lose_at, serve

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
# One that attends, one with recurrent state, and one with windows, a pool of their own and scaled embeddings.
MODELS = ("qwen3moe", "qwen3next", "gemma4")
PLACEHOLDER = 3
ANSWER = 12
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 6}'


class Served(NamedTuple):
    model: CpuModel
    runner: Runner
    files: EmbeddingFiles

    @property
    def vocab(self) -> int:
        return self.runner.ready().vocab_size


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("spans")
    if request.param == "gemma4":
        path, more = (
            write_gemma(folder / "gemma.gguf", Type.F32, causal_pictures=True),
            {"kv_window_ratio": 0.2},
        )
    else:
        path, more = FIXTURES / f"tiny-{request.param}-q4_k_m.gguf", {}
    model = load(path, **more)
    files = EmbeddingFiles(folder / "spans")
    return Served(model, build_cpu_runner(model, files), files)


def embeddings(runner: Runner, tokens: Sequence[int]) -> np.ndarray:
    """What the first layer reads of these tokens: float32 [n, hidden]."""
    engine = runner.engine
    assert isinstance(engine, CpuEngine)
    shape, table = engine._model.shape, engine._model._weights.embedding
    x = torch.empty(len(tokens), shape.hidden_size)
    ids = torch.tensor(tokens, dtype=torch.int32)
    engine.stream.embed(table.table, table.ggml_type, ids, len(tokens), x, scale=shape.embedding_scale)
    engine.stream.wait()
    return x.numpy()


def with_spans(
    served: Served, message: GenerateRequest, places: Sequence[tuple[int, int]]
) -> GenerateRequest:
    """The same prompt, but for places (start, count) that are embeddings."""
    tokens = np.frombuffer(message.token_ids, np.int32)
    for start, count in places:
        rows = embeddings(served.runner, tokens[start : start + count].tolist())
        message = spanned(message, start, served.files, rows)
    return message


def spanned(message: GenerateRequest, start: int, files: EmbeddingFiles, rows: np.ndarray) -> GenerateRequest:
    """The same prompt, with these embeddings from `start` on, behind all others."""
    tokens = np.frombuffer(message.token_ids, np.int32).copy()
    tokens[start : start + len(rows)] = PLACEHOLDER
    span = EmbeddingSpan(start, len(rows), sha256(rows.tobytes()).digest(), files.write(rows.tobytes()))
    return replace(message, token_ids=tokens.tobytes(), spans=[*message.spans, span])


def asked(id: int, tokens: list[int], **sampling: object) -> GenerateRequest:
    params = {"max_tokens": ANSWER, "temperature": 0.7, "seed": id, "logprobs": 2} | sampling
    return replace(request(id, tokens, ANSWER), sampling=SamplingParams(**params))  # type: ignore[arg-type]


def prompts(vocab: int, count: int = 4, length: int = 48) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(4, vocab) for _ in range(length)] for _ in range(count)]


# At the beginning, beside one another, a single position, at the end.
PLACES = ([(0, 7)], [(5, 9), (14, 6)], [(20, 1), (30, 17)], [(40, 8)])


def pairs(
    served: Served, count: int = 4, **sampling: object
) -> tuple[list[GenerateRequest], list[GenerateRequest]]:
    """The prompts as tokens, and with embeddings."""
    plain = [asked(id, tokens, **sampling) for id, tokens in enumerate(prompts(served.vocab, count))]
    return plain, [with_spans(served, *one) for one in zip(plain, cycle(PLACES), strict=False)]


def same(served: Served, **limits: object) -> None:
    plain, with_rows = pairs(served)
    expected, _ = answers(served, plain)
    found, _ = answers(served, with_rows, **limits)  # type: ignore[arg-type]
    assert found == expected


def answers(
    served: Served,
    requests: list[GenerateRequest],
    during: Callable[[Told, int], None] = lambda *_: None,
    **limits: object,
) -> tuple[dict[int, Answer], LoadReport]:
    size = 4 * served.runner.ready().embedding_size
    return serve(served.runner, requests, 0, during, embedding_bytes=size, **limits)


@pytest.mark.parametrize("chunk", [256, 16, 7])
def test_the_tokens_own_logits(served: Served, chunk: int) -> None:
    """Whole, and in chunks that cut spans; a chunk of 7 has rows of several prompts."""
    same(served, max_num_batched_tokens=chunk)


def test_a_picture_twice_and_nothing_else(served: Served) -> None:
    """The same content beside itself, and prompts without any token; the second prompt finds the first one's KV."""
    picture = prompts(served.vocab, 1, 16)[0]
    texts = [picture * 2, [*picture * 2, *picture[:5]], picture]
    places = [[(0, 16), (16, 16)], [(0, 16), (16, 16), (32, 5)], [(0, 16)]]
    plain = [asked(id, tokens) for id, tokens in enumerate(texts)]
    with_rows = [with_spans(served, *one) for one in zip(plain, places, strict=True)]
    expected, by_tokens = serve_in_turn(served, plain)
    found, by_spans = serve_in_turn(served, with_rows)
    assert found == expected
    assert by_spans == by_tokens


def test_other_embeddings_give_other_answers(served: Served) -> None:
    """What the other tests rest on: the rows are looked at, and the placeholders are not."""
    plain, with_rows = pairs(served)
    swapped = []
    for one in with_rows:
        first = one.spans[0]
        rows = embeddings(served.runner, [9] * first.count)
        handle = served.files.write(rows.tobytes())
        new = replace(first, handle=handle, sha256=sha256(rows.tobytes()).digest())
        swapped.append(replace(one, spans=[new, *one.spans[1:]]))
    expected, _ = answers(served, plain)
    found, _ = answers(served, swapped)
    assert all(found[id].logprobs != expected[id].logprobs for id in expected)
    renamed = []
    for one in with_rows:
        ids = np.frombuffer(one.token_ids, np.int32).copy()
        ids[ids == PLACEHOLDER] = 4
        renamed.append(replace(one, token_ids=ids.tobytes()))
    found, _ = answers(served, renamed)
    assert found == expected


def preempt(world: Told, number: int) -> None:
    """Prompts under way, and answers."""
    if number in (1, 3, 9, 14):
        batch = world.scheduler._batch
        for one in [one for one in batch.running.values() if one.state in PREEMPTIBLE]:
            batch.preempt(one)


@pytest.mark.parametrize("reuse", [True, False])
def test_preempted(served: Served, reuse: bool) -> None:
    """What was computed is found again, or computed again."""
    plain, with_rows = pairs(served, 8, max_tokens=40)
    expected, _ = answers(served, plain)
    found, report = answers(served, with_rows, preempt, reuse_prefixes=reuse, max_num_batched_tokens=32)
    assert found == expected
    assert report.preemptions >= 4
    assert reuse or report.repeated_tokens > 48


def test_a_lost_worker(served: Served) -> None:
    """The next one has the embeddings again."""
    plain, with_rows = pairs(served)
    expected, _ = answers(served, plain)
    lose = lose_at(1, 6, successor=lambda: build_cpu_runner(served.model, served.files))
    found, report = answers(served, with_rows, lose, max_num_batched_tokens=32)
    assert found == expected
    assert report.engine_losses == 2


def test_penalties_are_of_tokens(served: Served) -> None:
    """A position of a span counts as no token, as it has none."""
    tokens = prompts(served.vocab, 1)[0]
    message = asked(0, tokens, repetition_penalty=1.5, presence_penalty=0.5)
    found, _ = answers(served, [with_spans(served, message, [(4, 20)])])
    assert len(found[0].tokens) == ANSWER


def test_prefix_cache(served: Served) -> None:
    """The same content is found again, under whatever name; another is not, though all ids are the same."""
    tokens = prompts(served.vocab, 1, 64)[0]
    other = tokens[:10] + [token % (served.vocab - 4) + 4 for token in tokens[10:40]] + tokens[40:]
    assert other != tokens
    texts = [tokens, other, tokens, other]
    plain = [asked(id, text) for id, text in enumerate(texts)]
    with_rows = [with_spans(served, message, [(10, 30)]) for message in plain]
    assert len({message.token_ids for message in with_rows}) == 1
    assert len({message.spans[0].handle for message in with_rows}) == 4
    expected, by_tokens = serve_in_turn(served, plain)
    found, by_spans = serve_in_turn(served, with_rows)
    assert found == expected
    assert by_spans == by_tokens
    assert by_spans[2] > 40
    assert by_spans[1] <= 10


def serve_in_turn(served: Served, requests: list[GenerateRequest]) -> tuple[dict[int, Answer], list[int]]:
    """One after the other, by one router: each request's answer, and how many of its tokens were cached."""
    waiting = requests[1:]
    worlds: set[Told] = set()

    def next_one(world: Told, _: int) -> None:
        worlds.add(world)
        if world.scheduler.is_idle and waiting:
            world.add(waiting.pop(0))

    found, _ = answers(served, requests[:1], next_one)
    (world,) = worlds
    finals = [world.seen[message.id].final for message in requests]
    assert not waiting
    return found, [
        final.usage.cached_tokens for final in finals if isinstance(final, TokensItem) and final.usage
    ]


@pytest.mark.parametrize("name", ["qwen3moe", "qwen3next"])
def test_a_disk_tier(name: str, tmp_path: Path) -> None:
    """After a restart, whose router gives other numbers, pages of the same content come from disk, and no others."""
    path, options = FIXTURES / f"tiny-{name}-q4_k_m.gguf", {"kv_disk": str(tmp_path / "tier")}
    model, files = load(path, **options), EmbeddingFiles(tmp_path / "spans")
    said: dict[int, list[int]] = {}
    for is_restarted, ids in ((False, (0, 1)), (True, (1, 0, 2))):
        runner = build_cpu_runner(model, files)
        texts = prompts(runner.ready().vocab_size, 3, 170)
        world = RealTimeWorld(runner)
        for id in ids:
            prompt = request(id, [5] * 300, 4)
            prompt = replace(prompt, sampling=SamplingParams(max_tokens=4, temperature=0.0))
            world.add(spanned(prompt, 30, files, embeddings(runner, texts[id])))
            world.finish()
            assert said.setdefault(id, world.seen[id].tokens) == world.seen[id].tokens
            usage = final_item(world, id).usage
            assert usage is not None
            comes_again = is_restarted and id != 2
            assert (usage.disk_tokens > 200) == comes_again, usage
            assert (usage.cached_tokens > 30) == comes_again, usage
    assert len({tuple(tokens) for tokens in said.values()}) == 3


def test_drafts_stop_in_front_of_a_span(tmp_path: Path) -> None:
    """What followed the last tokens before was a picture, say: a draft ends there, and the answers are the same."""
    model, files = (
        load(FIXTURES / "tiny-qwen3moe-q4_k_m.gguf", speculative_config=NGRAM),
        EmbeddingFiles(tmp_path),
    )
    runner = build_cpu_runner(model, files)
    few = dict.fromkeys((5, 7), 100.0)  # so that the answer is of two tokens, which stand before the span
    prompt = [5, 7, 5, 5, 7, 7, 5, 7, *[9] * 20, 5, 7, 5, 5, 7, 7, 5]
    message = asked(0, prompt, logit_bias=few, temperature=1.0, max_tokens=40)
    size = 4 * runner.ready().embedding_size
    found = []
    for drafts in (0, 4):
        with_rows = spanned(message, 8, files, embeddings(runner, [11] * 20))
        answer, report = serve(runner, [with_rows], drafts, embedding_bytes=size)
        found.append(answer)
    assert found[0] == found[1]
    assert report.accepted_draft_tokens > 0
