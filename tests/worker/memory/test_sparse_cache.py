"""The router's scheduler and the worker of a model that chooses keys: whatever was cached, shared, evicted, preempted
or read from disk after a restart, the tokens are those of a server without a prefix cache. The contexts have many times
the keys that are chosen, so that a lost or stale index key would change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType as Type

from moeserve.messages.router_metrics import LoadReport
from moeserve.worker.loading.cpu.load import CpuModel, build_cpu_runner, load_cpu_model
from moeserve.worker.runner import Runner
from tests.gpu.driver import small_config
from tests.support.models import minimaxm3_model, qwen4exp_model
from tests.support.models.hugging_face_model import write_family
from tests.support.worker.worker_conversations import ANSWER, Answers, converse

FAMILIES = ("glm_moe_dsa", "deepseek_v32", "minimax-m3", "qwen4exp")


def write(family: str, folder: Path) -> Path:
    if family.startswith(("glm", "deepseek")):
        write_family(folder, family)
        return folder
    module: Any = {"minimax-m3": minimaxm3_model, "qwen4exp": qwen4exp_model}[family]
    path: Path = module.write_model(module.new_model(8), folder / "m.gguf", Type.Q8_0)
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuModel:
    """With a disk tier, which its runners open one after the other."""
    folder = tmp_path_factory.mktemp("sparse")
    path = write(request.param, folder)
    config = small_config(path, device="cpu", threads=2, max_num_seqs=4, kv_disk=str(folder / "tier"))
    return load_cpu_model(config, lambda *_: None)


@pytest.fixture(scope="module")
def runner(model: CpuModel) -> Runner:
    return build_cpu_runner(model)


def serve(runner: Runner, **limits: object) -> tuple[Answers, LoadReport]:
    """The shared prompt ends within a block of index keys."""
    return converse(runner, system_tokens=101, **limits)


@pytest.fixture(scope="module")
def expected(runner: Runner) -> Answers:
    answers, report = serve(runner, reuse_prefixes=False)
    assert report.cached_tokens == 0
    assert all(len(tokens) == ANSWER for tokens in answers.values())
    assert len({tuple(tokens) for tokens in answers.values()}) > 8
    return answers


@pytest.mark.parametrize(
    "limits", [{}, {"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 33}], ids=str
)
def test_a_cached_prefix_does_not_change_a_token(
    runner: Runner, expected: Answers, limits: dict[str, object]
) -> None:
    answers, report = serve(runner, **limits)
    assert answers == expected
    assert report.cached_tokens >= 0.4 * report.prompt_tokens


def test_a_preempted_answer_goes_on_as_it_would(runner: Runner, expected: Answers) -> None:
    """A pool so small that the second turns do not fit beside one another, as they were predicted to."""
    answers, report = serve(runner, num_kv_slots=460)
    assert answers == expected
    assert report.preemptions > 0


def test_the_next_process_continues_from_index_keys_on_disk(
    runner: Runner, model: CpuModel, expected: Answers
) -> None:
    """What the first runner writes, another reads; the process and its weights are the same."""
    ready = runner.ready()
    tier = {
        "page_tokens": ready.kv_page_tokens,
        "page_bytes": ready.kv_page_bytes,
        "state_bytes": ready.state_bytes,
    }
    runner.router_lost()  # the one of the tests before, which had no tier
    answers, report = serve(runner, **tier)
    assert answers == expected
    assert report.disk.bytes_written > 0
    again, report = serve(build_cpu_runner(model), **tier)
    assert again == expected
    assert report.disk.tokens >= 64  # of the system prompt, once
    assert report.disk.failed_pages == 0
