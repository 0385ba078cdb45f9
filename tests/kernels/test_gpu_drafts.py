"""Drafts on a GPU engine under Triton's interpreter: texts are those without drafts, whatever tokens depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.launch import first_launches
from moeserve.messages.schema import GenerateRequest
from moeserve.models.open import open_dummy_model
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from tests.gpu.driver import small_config
from tests.support.foreseen_drafts import Foreseen, asked, whole_texts
from tests.support.model_header import qwen3moe, write_header
from tests.support.served_answers import serve

MOST = 3
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 6}'
ANSWER = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    shape = qwen3moe(
        hidden_size=256, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=128, num_experts=4, top_k=2,
        expert_width=256, context_length=128, vocab_size=128,
    )  # fmt: skip
    write_header(path, shape)
    return path


def runner_of(model: Path, **options: object) -> Runner:
    config = small_config(
        model, load_format="dummy", threads=1, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64,
        max_total_tokens=256, speculative_config=NGRAM, **options,
    )  # fmt: skip
    return load_gpu_runner(config, open_dummy_model(model), lambda *_: None, torch.device(DEVICE), Start())


@pytest.fixture(scope="module", params=[4, 2], ids=["all on the GPU", "half in RAM"])
def runner(model: Path, request: pytest.FixtureRequest) -> Runner:
    return runner_of(model, num_gpu_experts=request.param)


def requests_of(count: int, vocab: int, **sampling: Any) -> list[GenerateRequest]:
    requests = asked(count, vocab, length=20, **({"max_tokens": ANSWER} | sampling))
    return [msgspec.structs.replace(one) for one in requests]


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "logprobs": None},
        {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    ],
    ids=["greedy", "drawn", "penalties"],
)
def test_same_texts(runner: Runner, streams: int, sampling: dict[str, Any]) -> None:
    requests = requests_of(streams, runner.ready().vocab_size, **sampling)
    expected, before = serve(runner, requests, 0, max_num_batched_tokens=32)
    assert runner._drafts is not None
    runner._drafts._drafter = Foreseen(runner._sequences.tokens, whole_texts(requests, expected), 0.8)
    launched = first_launches()
    found, report = serve(runner, requests, MOST, max_num_batched_tokens=32)
    assert {id: answer.tokens for id, answer in found.items()} == {
        id: answer.tokens for id, answer in expected.items()
    }
    assert report.accepted_draft_tokens > ANSWER * streams / 4
    assert report.steps < before.steps
    assert first_launches() == launched  # all was compiled before the first request
    assert isinstance(runner.engine, GpuEngine)
