"""Prompts with pictures on a GPU worker (Triton's interpreter where there is no GPU), beside the CPU engine and, with
the fixtures, beside transformers' float32 logits: however prompts are cut, and wherever experts and layers are."""

from __future__ import annotations

from itertools import starmap
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from msgspec.structs import replace

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.cli.bench.plans_in_turn import run_in_turn
from moeserve.messages.sampling import SamplingParams, TokenLogprob
from moeserve.messages.schema import GenerateRequest
from moeserve.messages.steps import Row, StepPlan
from moeserve.models.open import open_model
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.router.core.policy.preemption import PREEMPTIBLE
from moeserve.worker.loading.cpu.load import build_cpu_runner
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from tests.gpu.driver import GREEDY, small_config
from tests.support.models.gemma_file import HIDDEN, VOCAB, write_gemma
from tests.support.models.hugging_face_settings import SETTINGS
from tests.support.models.qwen4exp_model import new_model as new_qwen4exp
from tests.support.models.qwen4exp_model import write_model as write_qwen4exp
from tests.support.pictures.deepstack_model import write_model
from tests.support.pictures.gemma3_model import write_model as write_gemma3
from tests.support.pictures.picture_fixture import (
    GEMMA_MODEL,
    MODEL,
    PICTURES,
    PictureCase,
    gemma_picture_cases,
    picture_cases,
)
from tests.support.pictures.picture_steps import asked, kl, logits, seq_of
from tests.support.worker.served_answers import Told, load, serve

# Under the interpreter, whose steps take seconds, one picture.
QWEN = [picture_cases()[name] for name in PICTURES[: None if DEVICE == "cuda" else 1]]
# From the CPU engine in float32: a GPU multiplies in 16 bits, where the wrong rows would cost more than 1e-3, too.
FROM_CPU, ROWS_FROM_CPU = (1e-3, 1e-3) if DEVICE == "cuda" else (1e-4, 1e-5)
GEMMA = [gemma_picture_cases()[name] for name in PICTURES[: None if DEVICE == "cuda" else 1]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingFiles:
    return EmbeddingFiles(tmp_path_factory.mktemp("pictures") / "spans")


def gpu_runner(files: EmbeddingFiles, model: Path, **options: object) -> Runner:
    fixed = {
        "device": "cuda",
        "threads": 2,
        "gpu_prefill_token_threshold": 1000,
        "max_num_batched_tokens": 256,
    }
    config, device = small_config(model, **fixed | options), torch.device(DEVICE)
    return load_gpu_runner(config, open_model(model), lambda *_: None, device, Start(), 0, files)


def case_of(
    tokens: list[int], start: int, shape: tuple[int, int], width: int, *, rotates: bool
) -> PictureCase:
    """A prompt whose tokens from `start` on are a picture of shape[0] x shape[1] random embeddings."""
    rows, columns = shape
    count, rng = rows * columns, np.random.default_rng(start)
    truth: dict[str, np.ndarray] = {"embeddings": rng.normal(0, 1, (count, width)).astype(np.float32)}
    if rotates:
        ids = np.tile(np.arange(len(tokens)), (3, 1))
        ids[0, start : start + count] = start
        ids[1, start : start + count] = start + np.repeat(np.arange(rows), columns)
        ids[2, start : start + count] = start + np.tile(np.arange(columns), rows)
        truth["position_ids"] = ids
    is_picture = [start <= at < start + count for at in range(len(tokens))]
    return PictureCase("random", Path(), (0, 0), tokens, is_picture, truth, {})


# ---------------------------------------------------------------- tiny models, beside the CPU engine

DEEP = [
    case_of([*range(50, 54), *[1] * 6, *range(100, 106)], 4, (2, 3), 3 * 128, rotates=True),
    case_of([*range(60, 62), *[1] * 8, *range(120, 123)], 2, (4, 2), 3 * 128, rotates=True),
]
SEEING = [
    case_of([(7 * at) % VOCAB for at in range(30)], 4, (1, 19), HIDDEN, rotates=False),
    case_of([(5 * at) % VOCAB for at in range(12)], 6, (1, 3), HIDDEN, rotates=False),
]

SEEN_BY_ALL = [
    case_of([(7 * at) % 500 for at in range(30)], 4, (1, 19), SETTINGS["hidden_size"], rotates=False),
    case_of([(5 * at) % 500 for at in range(12)], 6, (1, 3), SETTINGS["hidden_size"], rotates=False),
]


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-VL-MoE: positions in sections, and embeddings that are added behind the first layers."""
    folder = tmp_path_factory.mktemp("deep") / "tiny"
    write_model(folder, has_experts=True)
    return folder


def check_near(found: list[np.ndarray], expected: list[np.ndarray], most: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert np.isfinite(ours).all()
        assert kl(theirs, ours) < most


SLOW = pytest.mark.slow  # a minute of CPU time each
IN_RAM = {"num_gpu_experts": 2, "n_gpu_layers": 1}


@pytest.mark.parametrize(
    ("options", "chunk"),
    [
        pytest.param({"num_gpu_experts": 8}, 7, id="all on the GPU, in chunks of 7", marks=SLOW),
        pytest.param({"num_gpu_experts": 8}, 64, id="all on the GPU, whole", marks=SLOW),
        pytest.param({"num_gpu_experts": 8}, 3, id="all on the GPU, in steps of few rows", marks=SLOW),
        pytest.param(IN_RAM, 64, id="layers and experts in RAM, whole", marks=SLOW),
        pytest.param(IN_RAM, 3, id="layers and experts in RAM, in steps of few rows", marks=SLOW),
    ],
)
def test_sections_and_deepstack(
    files: EmbeddingFiles, deep_model: Path, options: dict[str, object], chunk: int
) -> None:
    """Two prompts side by side, cut within their pictures. Without DeepStack's additions, and with positions by index,
    the distance is far larger."""
    cpu = build_cpu_runner(load(deep_model), files)
    expected = logits(cpu, files, DEEP, 64)
    runner = gpu_runner(files, deep_model, **options)
    assert (runner.ready().embedding_size, runner.ready().rotates_in_sections) == (3 * 128, True)
    check_near(logits(runner, files, DEEP, chunk), expected, FROM_CPU)
    for case, right in zip(DEEP, expected, strict=True):
        flat = case.truth["embeddings"].copy()
        flat[:, 128:] = 0.0
        for other in ({**case.truth, "embeddings": flat}, {"embeddings": case.truth["embeddings"]}):
            (found,) = logits(cpu, files, [case._replace(truth=other)], 64)
            assert kl(right, found) > 1e-3


@pytest.mark.slow  # half a minute each
@pytest.mark.parametrize(
    "options",
    [{}, {"kv_window_ratio": 0.2}],
    ids=["one pool", "windows apart"],
)
def test_rows_that_see_one_another(files: EmbeddingFiles, tmp_path: Path, options: dict[str, object]) -> None:
    """Gemma's: beside the CPU engine's, in tiles, in a step of few rows, and where a later chunk has text alone."""
    model = write_gemma(tmp_path / "gemma.gguf", Type.F32)
    expected = logits(build_cpu_runner(load(model, **options), files), files, SEEING, 256, whole=True)
    runner = gpu_runner(files, model, num_gpu_experts=4, **options)
    assert runner.ready().whole_spans
    for chunk in (64, 5):
        check_near(logits(runner, files, SEEING, chunk, whole=True), expected, ROWS_FROM_CPU)
    with pytest.raises(ValueError, match="before the end of a span that is computed whole"):
        logits(runner, files, SEEING, 7)


@SLOW
def test_all_layers_see_a_span_whole(files: EmbeddingFiles, tmp_path: Path) -> None:
    """Gemma 3's, beside the CPU engine's; its longest span is longer than its windows."""
    write_gemma3(tmp_path / "model")
    expected = logits(build_cpu_runner(load(tmp_path / "model"), files), files, SEEN_BY_ALL, 256, whole=True)
    runner = gpu_runner(files, tmp_path / "model")
    assert runner.ready().whole_spans
    check_near(logits(runner, files, SEEN_BY_ALL, 64, whole=True), expected, ROWS_FROM_CPU)


@SLOW
@pytest.mark.parametrize(
    "options", [{}, {"n_gpu_layers": 3}], ids=["all on the GPU", "the first layer in RAM"]
)
def test_blocks_of_keys_are_chosen_behind_a_picture(
    files: EmbeddingFiles, tmp_path: Path, options: dict[str, object]
) -> None:
    """Qwen3.8-Flash-Next's, whose index keys rotate by three positions; the last ones choose 2 of 5 blocks."""
    model = write_qwen4exp(new_qwen4exp(9, indexer_budget=8), tmp_path / "m.gguf", Type.F16)
    case = case_of([(7 * at) % 600 for at in range(24)], 2, (4, 4), 128, rotates=True)
    (expected,) = logits(build_cpu_runner(load(model), files), files, [case], 64)
    (found,) = logits(gpu_runner(files, model, **options), files, [case], 64)
    # Index keys that rotate by the tokens' numbers change other rows' choice: 0.2 to 2.0 of three rows behind it.
    assert max(kl(right[None], ours[None]) for right, ours in zip(expected, found, strict=True)) < 1e-2


@SLOW
def test_steps_launched_ahead(files: EmbeddingFiles, deep_model: Path) -> None:
    """Rows of answers rotate behind pictures, also where a step's tokens are not known yet."""
    runner = gpu_runner(files, deep_model, num_gpu_experts=8)
    assert runner.runs_ahead

    def plans(step: int) -> StepPlan:
        length = len(DEEP[0].tokens)
        first, count = (0, length) if step == 0 else (length + step - 1, 1)
        slots = np.arange(first, first + count, dtype=np.int32).tobytes()
        new = [replace(seq_of(files, 0, DEEP[0]), sampling=GREEDY)] if step == 0 else []
        return StepPlan(step, new, [Row(0, first, count, slots, True)])

    ahead = list(run_in_turn(runner, map(plans, range(5))))
    in_turn = [runner.step(plans(step)) for step in range(5)]
    assert sum(answered.is_ahead for answered in ahead) >= 3
    texts = [answered.result.sampled[0].token_id for answered in ahead]
    assert texts == [result.sampled[0].token_id for result in in_turn]
    # The whole as a prompt: the same predictions, from rows of chunks.
    longer = DEEP[0]._replace(
        tokens=[*DEEP[0].tokens, *texts[:4]], is_picture=[*DEEP[0].is_picture, *[False] * 4]
    )
    (expected,) = logits(build_cpu_runner(load(deep_model), files), files, [longer], 64)
    behind = expected[len(DEEP[0].tokens) - 1 :]
    for row, answered in zip(behind, ahead, strict=True):
        entry = answered.result.sampled[0].logprob
        assert entry is not None
        near(entry, row)


def near(entry: TokenLogprob, row: np.ndarray) -> None:
    """entry: with the likeliest tokens; row: logits. The root of their mean square is compared: steps of few rows
    multiply 8-bit integers, so that one token of a hundred is off by more. Without DeepStack it would be 0.24 to 0.6,
    with positions by index more than 1.2."""
    exact = row - np.logaddexp.reduce(row.astype(np.float64))
    errors = np.array(entry.top_logprobs) - exact[list(entry.top_ids)]
    assert np.sqrt(np.mean(errors**2)) < 0.05


# ---------------------------------------------------------------- fixtures, beside transformers


def check_logits(found: np.ndarray, case: PictureCase, most: float, *, text_only: bool) -> None:
    """text_only: the logits of pictures' rows, which nothing reads, are not looked at."""
    rows = ~np.array(case.is_picture) if text_only else np.ones(len(case.tokens), np.bool_)
    assert kl(case.truth["logits"][rows], found[rows]) < most
    behind = np.arange(len(case.tokens)) >= case.end
    assert kl(case.truth["logits"][behind], found[behind]) < most


@pytest.mark.slow  # three minutes of CPU time each
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_gpu_experts": 8}, id="all on the GPU"),
        pytest.param({"num_gpu_experts": 3, "expert_cache": "off"}, id="experts in RAM"),
        pytest.param({"num_gpu_experts": 3}, id="expert cache"),
        pytest.param({"num_gpu_experts": 3, "n_gpu_layers": 2}, id="layers in RAM"),
    ],
)
@pytest.mark.parametrize("chunk", [256, 33, 7])
def test_qwen(files: EmbeddingFiles, options: dict[str, object], chunk: int) -> None:
    """Qwen3.5's recurrent states and positions in sections; prompts side by side, cut within pictures. llama.cpp's own
    distance is 2e-6 to 4e-6; steps of few rows multiply integers."""
    runner = gpu_runner(files, MODEL, **options)
    for case, found in zip(QWEN, logits(runner, files, QWEN, chunk), strict=True):
        check_logits(found, case, 1e-4, text_only=True)


@pytest.mark.slow  # three minutes of CPU time each
@pytest.mark.parametrize("chunk", [256, 33, 7])
def test_gemma(files: EmbeddingFiles, chunk: int) -> None:
    """A causal picture would cost 0.3 to 0.4."""
    runner = gpu_runner(
        files, GEMMA_MODEL, max_num_batched_tokens=512
    )  # a chunk goes on to its picture's end
    for case, found in zip(GEMMA, logits(runner, files, GEMMA, chunk, whole=True), strict=True):
        check_logits(found, case, 1e-3, text_only=False)


def preempt(world: Told, number: int) -> None:
    if number in (2, 4):
        batch = world.scheduler._batch
        for one in [one for one in batch.running.values() if one.state in PREEMPTIBLE]:
            batch.preempt(one)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [64, 8])
def test_through_the_scheduler(files: EmbeddingFiles, deep_model: Path, chunk: int) -> None:
    """Cut, preempted and computed again, and sent a second time with its KV in the cache: the answers' first tokens are
    as likely as on the CPU."""
    runner, sampling = (
        gpu_runner(files, deep_model, num_gpu_experts=8),
        SamplingParams(max_tokens=6, temperature=0.0, logprobs=5),
    )

    def requests(first: int) -> list[GenerateRequest]:
        return [replace(one, sampling=sampling) for one in starmap(asked_of, enumerate(DEEP, first))]

    def asked_of(id: int, case: PictureCase) -> GenerateRequest:
        return asked(files, id, case)

    later = requests(2)

    def then(world: Told, number: int) -> None:
        preempt(world, number)
        if world.scheduler.is_idle and later:
            world.add(later.pop(0))

    ready = runner.ready()
    limits = {
        "embedding_bytes": 4 * ready.embedding_size,
        "rotates_in_sections": True,
        "max_num_batched_tokens": chunk,
    }
    expected = logits(build_cpu_runner(load(deep_model), files), files, DEEP, 64)
    found, report = serve(runner, requests(0), 0, then, **limits)
    assert not later
    assert report.preemptions > 0
    assert report.cached_tokens > sum(case.end for case in DEEP) / 2
    for id, answer in found.items():
        entry = answer.logprobs[0]
        assert isinstance(entry, TokenLogprob)
        near(entry, expected[id % 2][-1])
