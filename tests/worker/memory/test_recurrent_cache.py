"""The router's scheduler and a recurrent model's worker: whatever was cached, shared, evicted, preempted or read from
disk after a restart, the tokens are those of a server without a prefix cache."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from gguf.constants import GGMLQuantizationType as Type

from moeserve.worker.loading.cpu.load import CpuModel, build_cpu_runner, load_cpu_model
from moeserve.worker.runner import Runner
from tests.conftest import OWN_FIXTURES
from tests.gpu.driver import small_config
from tests.support.models import glm5next_model
from tests.support.models.deepseek4_model import new_model, write_model
from tests.support.models.hugging_face_model import write_family
from tests.support.router.router_world import request
from tests.support.worker.worker_conversations import ANSWER, GREEDY, Answers, converse, world_of


@pytest.fixture(
    scope="module",
    params=[
        *("qwen3next-q4_k_m", "qwen35moe-q4_k_m", "kimilinear-f16", "nemotronhmoe-f16", "deepseek4"),
        "falconh1-f16",
        pytest.param("glm5next", marks=pytest.mark.slow),
        pytest.param("bailing_hybrid", marks=pytest.mark.slow),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuModel:
    """With a disk tier, which its runners open one after the other."""
    path = OWN_FIXTURES / f"tiny-{request.param}.gguf"
    if request.param == "deepseek4":  # its state has the window's keys, too
        path = write_model(new_model(8), tmp_path_factory.mktemp("model") / "m.gguf", Type.F16)
    if request.param == "glm5next":  # whose pages have what index keys are made of
        made = glm5next_model.new_model(8)
        path = glm5next_model.write_model(made, tmp_path_factory.mktemp("model") / "m.gguf", Type.F16)
    if request.param == "bailing_hybrid":
        path = tmp_path_factory.mktemp("model") / "ling"
        write_family(path, request.param)
    if not path.exists():
        path = request.getfixturevalue("wide_fixtures") / "families" / path.name
    folder = tmp_path_factory.mktemp("disk") / "tier"
    config = small_config(path, device="cpu", threads=2, max_num_seqs=4, kv_disk=str(folder))
    return load_cpu_model(config, lambda *_: None)


@pytest.fixture(scope="module")
def runner(model: CpuModel) -> Runner:
    return build_cpu_runner(model)


@pytest.fixture(scope="module")
def expected(runner: Runner) -> Answers:
    answers, report = converse(runner, reuse_prefixes=False)
    assert report.cached_tokens == 0
    assert all(len(tokens) == ANSWER for tokens in answers.values())
    return answers


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"num_state_slots": 6},  # two snapshots beside four running requests
        {"num_kv_slots": 420, "num_state_slots": 5},
    ],
    ids=str,
)
def test_snapshots_do_not_change_a_token(runner: Runner, expected: Answers, limits: dict[str, Any]) -> None:
    answers, report = converse(runner, **limits)
    assert answers == expected
    assert report.state_snapshot_hits >= 6
    if not limits:
        assert report.cached_tokens >= 0.6 * report.prompt_tokens


def test_of_ten_turns_nine_tenths_come_from_the_cache(runner: Runner) -> None:
    """A conversation's prompts, the first among them: what is computed is each message, and the answer's last token."""
    world = world_of(runner)
    rng, vocab_size = random.Random(1), runner.ready().vocab_size

    def text(length: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(length)]

    history = text(200)
    for turn in range(10):
        prompt = history + text(10)
        world.add(msgspec.structs.replace(request(turn, prompt, 6), sampling=GREEDY))
        world.run()
        history = prompt + world.seen[turn].tokens
    report = world.scheduler.load_report()
    assert report.cached_tokens >= 0.9 * report.prompt_tokens


def test_the_next_process_continues_from_states_on_disk(
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
    answers, report = converse(runner, **tier)
    assert answers == expected
    assert report.disk.bytes_written > ready.state_bytes
    again, report = converse(build_cpu_runner(model), **tier)
    assert again == expected
    assert report.disk.tokens >= 96  # of the system prompt, once
    assert report.disk.failed_pages == 0


def test_a_preempted_answer_goes_on_from_its_state(runner: Runner, expected: Answers) -> None:
    """A pool so small that the second turns do not fit beside one another, as they were predicted to."""
    answers, report = converse(runner, num_kv_slots=460)
    assert answers == expected
    assert report.preemptions > 0
