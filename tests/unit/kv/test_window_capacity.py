"""How KV memory is divided where every other layer is windowed: gpt-oss-20b's shape."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.capacity import KvCapacity, KvMemoryBudget, plan_capacity
from moeserve.kv.layout import KvLayout
from moeserve.kv.window_capacity import window_pool
from moeserve.launcher.launched_config import pinned
from moeserve.messages.steps import WorkerReady
from moeserve.models.attention import AttentionShape
from tests.support.models.model_header import QWEN3_30B_A3B

WINDOW, CONTEXT, ROWS = 128, 131_072, 512
LAYERS = tuple(
    dataclasses.replace(QWEN3_30B_A3B.layers[0], mixer=AttentionShape(64, 8, 64, window=window))
    for window in (WINDOW, 0)
)
SHAPE = dataclasses.replace(QWEN3_30B_A3B, layers=LAYERS * 12, context_length=CONTEXT)
LAYOUT = KvLayout(SHAPE)
TOKEN = LAYOUT.token_bytes()
ONE_POOL = ServerConfig(kv_window_ratio=0)


def pools(config: ServerConfig, gib: float = 16, layout: KvLayout = LAYOUT) -> tuple[int, int]:
    """Slots of both pools, which fit the memory."""
    budget = KvMemoryBudget("memory", int(gib * GIB), range(layout.shape.num_layers))
    capacity = plan_capacity(config, layout, [budget], ROWS)
    assert capacity.kv_bytes(layout) <= gib * GIB
    return capacity.num_slots, capacity.num_window_slots


def test_the_layout() -> None:
    assert TOKEN == 24 * 2 * 8 * 64 * 2
    assert LAYOUT.window == WINDOW
    assert LAYOUT.windowed_layers == tuple(range(0, 24, 2))
    assert KvLayout(QWEN3_30B_A3B).window == 0


def test_a_quarter_is_the_windowed_layers_and_the_rest_holds_half_as_much_again() -> None:
    one_pool, none = pools(ONE_POOL)
    assert (one_pool, none) == (16 * GIB // TOKEN, 0)
    slots, windows = pools(ServerConfig(kv_window_ratio=0.25))
    assert slots == pytest.approx(1.5 * one_pool, rel=1e-4)
    assert windows == pytest.approx(0.5 * one_pool, rel=1e-4)


def test_by_default_a_token_of_the_windowed_layers_to_three_of_the_others() -> None:
    slots, windows = pools(ServerConfig())
    assert (slots, windows) == pools(ServerConfig(kv_window_ratio=0.25))
    five_of_six = dataclasses.replace(SHAPE, layers=(*LAYERS[:1] * 5, LAYERS[1]) * 4)
    slots, windows = pools(ServerConfig(max_num_seqs=8), layout=KvLayout(five_of_six))
    assert slots == pytest.approx(3 * windows, rel=1e-4)
    assert slots > 2.2 * pools(ONE_POOL)[0]


def test_without_a_prefix_cache_the_windows_are_those_of_running_requests() -> None:
    config = ServerConfig(max_num_seqs=8, prefix_cache="off")
    slots, windows = pools(config)
    assert windows == 8 * WINDOW + 2 * ROWS
    assert slots > 1.9 * pools(ONE_POOL)[0]


def test_what_running_requests_need_comes_first() -> None:
    config = ServerConfig(max_num_seqs=64, max_model_len=CONTEXT, kv_window_ratio=0.01)
    assert pools(config)[1] == 64 * WINDOW + 2 * ROWS
    with pytest.raises(ConfigError, match="no room for more tokens"):
        pools(config, gib=0.3)


def test_a_request_may_be_as_long_as_the_larger_pool() -> None:
    config = ServerConfig(max_num_seqs=4, max_num_batched_tokens=ROWS)
    budget = KvMemoryBudget("memory", 2 * GIB, range(24))
    lengths = [
        plan_capacity(
            dataclasses.replace(config, kv_window_ratio=ratio), LAYOUT, [budget], ROWS
        ).max_model_len
        for ratio in (0.0, 0.1)
    ]
    assert lengths[1] > 1.7 * lengths[0]


def test_where_memory_does_not_limit_the_first_pool_a_second_saves_memory() -> None:
    config = ServerConfig(max_num_seqs=8, max_total_tokens=20_000, kv_window_ratio=0.25)
    assert pools(config) == (20_000, 20_000 // 3)
    config = ServerConfig(max_num_seqs=2, max_model_len=4096, kv_window_ratio=0.25)
    assert pools(config) == (8192, 8192 // 3)


def test_more_memory_never_makes_a_pool_smaller() -> None:
    """Or a worker that is started again could not stand in for the first one."""
    config = ServerConfig(max_num_seqs=16, max_model_len=16_384, kv_window_ratio=0.25)
    found = [pools(config, gib=gib / 8) for gib in range(16, 140)]
    assert found[0][0] < found[-1][0] == 16 * 16_384
    for number in (0, 1):
        column = [pair[number] for pair in found]
        assert column == sorted(column)


def test_tokens_that_fit_two_pools_alone() -> None:
    one_pool, _ = pools(ONE_POOL)
    asked = ServerConfig(max_total_tokens=int(1.4 * one_pool), kv_window_ratio=0)
    with pytest.raises(ConfigError, match="--max-total-tokens"):
        pools(asked)
    slots, _ = pools(dataclasses.replace(asked, kv_window_ratio=0.2))
    assert slots == asked.max_total_tokens


def ready_of(capacity: KvCapacity) -> WorkerReady:
    return WorkerReady(
        num_kv_slots=capacity.num_slots,
        num_window_slots=capacity.num_window_slots,
        max_num_seqs=16,
        max_model_len=capacity.max_model_len,
        max_num_batched_tokens=ROWS,
        vocab_size=1,
        weight_bytes=0,
        kv_bytes=0,
        device="cpu",
    )


@pytest.mark.parametrize("ratio", [None, 0.1, 0.4])
def test_a_worker_that_is_started_again_can_stand_in_for_the_first(ratio: float | None) -> None:
    """With as much memory or more, also where that would have changed how many pools there are."""
    config = ServerConfig(max_num_seqs=16, kv_window_ratio=ratio)
    layout = KvLayout(dataclasses.replace(SHAPE, context_length=16_384))
    kinds, limited = set(), set()
    for sixteenths in range(1, 180):
        if ratio is not None and sixteenths < 24:
            continue  # refused
        first = plan_capacity(
            config, layout, [KvMemoryBudget("memory", sixteenths * GIB // 16, range(24))], ROWS
        )
        config_again = pinned(config, ready_of(first))
        kinds.add(first.num_window_slots > 0)
        limited.add(first.num_slots < 16 * 16_384)
        for more in (0, GIB, 64 * GIB):
            budget = KvMemoryBudget("memory", sixteenths * GIB // 16 + more, range(24))
            again = plan_capacity(config_again, layout, [budget], ROWS)
            assert again.num_slots >= first.num_slots
            assert again.num_window_slots >= first.num_window_slots
            assert (again.num_window_slots > 0) == (first.num_window_slots > 0)
    assert kinds == ({True, False} if ratio is None else {True})
    assert limited == {True, False}


@pytest.mark.parametrize("tokens", [600, 3_000, 20_000, 300_000])
def test_the_memory_that_a_placement_keeps_holds_the_tokens(tokens: int) -> None:
    """Whether they are asked for, or all that is of use."""
    config = ServerConfig(max_num_seqs=2, max_model_len=tokens // 2)
    kept = window_pool(config, LAYOUT, ROWS)
    assert kept is not None
    for limited in (config, dataclasses.replace(config, max_total_tokens=tokens)):
        budget = KvMemoryBudget("GPU memory", kept.num_bytes(tokens), range(24))
        capacity = plan_capacity(limited, LAYOUT, [budget], ROWS)
        assert capacity.num_slots == tokens
        assert capacity.kv_bytes(LAYOUT) <= budget.free_bytes
    assert kept.num_bytes(tokens) <= tokens * TOKEN
    assert (kept.num_bytes(tokens) < 0.7 * tokens * TOKEN) == (tokens >= 20_000)


@pytest.mark.parametrize(
    ("options", "layout", "reason"),
    [
        ({}, KvLayout(QWEN3_30B_A3B), "all layers of this model attend to all tokens"),
        (
            {},
            KvLayout(dataclasses.replace(SHAPE, layers=LAYERS[:1] * 24)),
            "all layers of this model are windowed",
        ),
        ({"kv_disk": "/tmp/kv"}, LAYOUT, "tiers"),
        ({"kv_ram": 2.0}, LAYOUT, "tiers"),
        ({"gpus": "2"}, LAYOUT, "several GPUs"),
        ({"max_total_tokens": 1500}, LAYOUT, "no room for more tokens"),
    ],
)
def test_where_there_can_be_no_second_pool(
    options: dict[str, object], layout: KvLayout, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who asks for it is told why; who does not has one, and the log says so where the model could have two."""
    config = ServerConfig(**options)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "moeserve.kv.window_capacity"):
        assert pools(config, layout=layout)[1] == 0
    told = [record.getMessage() for record in caplog.records if record.name == "moeserve.kv.window_capacity"]
    assert [reason in message for message in told] == ([True] if options else [])
    with pytest.raises(ConfigError, match=f"--kv-window-ratio 0.25: .*{reason}"):
        pools(dataclasses.replace(config, kv_window_ratio=0.25), layout=layout)


def test_layers_on_the_cpu_and_on_a_gpu_have_one_pool() -> None:
    budgets = [
        KvMemoryBudget("GPU memory", 2 * GIB, range(4, 24)),
        KvMemoryBudget("memory", GIB, range(4), share=0.5),
    ]
    assert plan_capacity(ServerConfig(), LAYOUT, budgets, ROWS).num_window_slots == 0
    with pytest.raises(ConfigError, match="some layers are the CPU's"):
        plan_capacity(ServerConfig(kv_window_ratio=0.25), LAYOUT, budgets, ROWS)
