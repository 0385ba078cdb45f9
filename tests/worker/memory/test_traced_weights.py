"""The file whose routing follows a trace, with which benchmarks of experts on disk run in several engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moeserve.placement.expert_cache.generate import LOCAL, generate
from moeserve.placement.expert_cache.routing_trace import read_trace
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.gpu.driver import GREEDY, Driver, small_config
from tests.support.models.model_header import qwen3moe, write_header, write_weights
from tests.support.models.traced_weights import traced_type, write_routing

LAYERS, EXPERTS, TOP_K = 3, 16, 4


def test_a_greedy_answer_goes_through_the_trace(tmp_path: Path) -> None:
    shape = qwen3moe(
        hidden_size=256,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        top_k=TOP_K,
        expert_width=256,
        context_length=64,
        vocab_size=300,
    )
    trace = generate(LOCAL, "local", tokens=300, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    path, recorded = tmp_path / "traced.gguf", tmp_path / "trace"
    write_header(path, shape, traced_type)
    write_weights(path)
    write_routing(path, shape, trace)
    flags = {"threads": 1, "record_routing_trace": str(recorded), "record_routing_tokens": 40}
    driver = Driver(load_cpu_runner(small_config(path, **flags), lambda *_: None))
    token = driver.step([driver.new(0, [100], GREEDY)], [driver.row(0, 1, sample=True)]).sampled[0].token_id
    for expected in range(101, 140):
        assert token == expected
        token = driver.step([], [driver.row(0, 1, sample=True)]).sampled[0].token_id
    found = np.sort(read_trace(recorded).ids, axis=2)
    assert (found == np.sort(trace.ids[100:140], axis=2)).all()
