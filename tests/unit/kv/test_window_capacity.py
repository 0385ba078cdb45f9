"""How KV memory is divided where every other layer is windowed: gpt-oss-20b's shape."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.header import QWEN3_30B_A3B
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kv.capacity import KvMemoryBudget, plan_capacity
from moeserve.kv.layout import KvLayout
from moeserve.models.interface import AttentionShape
from moeserve.units import GIB

WINDOW, CONTEXT, ROWS = 128, 131_072, 512
LAYERS = tuple(
    dataclasses.replace(QWEN3_30B_A3B.layers[0], mixer=AttentionShape(64, 8, 64, window=window))
    for window in (WINDOW, 0)
)
SHAPE = dataclasses.replace(QWEN3_30B_A3B, layers=LAYERS * 12, context_length=CONTEXT)
LAYOUT = KvLayout(SHAPE)
TOKEN = LAYOUT.token_bytes()


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
    one_pool, none = pools(ServerConfig())
    assert (one_pool, none) == (16 * GIB // TOKEN, 0)
    slots, windows = pools(ServerConfig(kv_window_ratio=0.25))
    assert slots == pytest.approx(1.5 * one_pool, rel=1e-4)
    assert windows == pytest.approx(0.5 * one_pool, rel=1e-4)


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
    one_pool, _ = pools(ServerConfig())
    asked = ServerConfig(max_total_tokens=int(1.4 * one_pool))
    with pytest.raises(ConfigError, match="--max-total-tokens"):
        pools(asked)
    slots, _ = pools(dataclasses.replace(asked, kv_window_ratio=0.2))
    assert slots == asked.max_total_tokens


@pytest.mark.parametrize(
    ("options", "layout", "reason"),
    [
        ({}, KvLayout(QWEN3_30B_A3B), "all layers of this model attend to all tokens"),
        ({}, KvLayout(dataclasses.replace(SHAPE, layers=LAYERS[:1] * 24)), "all layers .* are windowed"),
        ({"kv_disk": "/tmp/kv"}, LAYOUT, "tiers"),
        ({"kv_ram": 2.0}, LAYOUT, "tiers"),
        ({"gpus": "2"}, LAYOUT, "several GPUs"),
        ({"max_total_tokens": 1500}, LAYOUT, "no room for more tokens"),
    ],
)
def test_where_there_can_be_no_second_pool(options: dict[str, object], layout: KvLayout, reason: str) -> None:
    """Who asks for it is told why; who does not has one."""
    config = ServerConfig(**options)  # type: ignore[arg-type]
    assert pools(config, layout=layout)[1] == 0
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
