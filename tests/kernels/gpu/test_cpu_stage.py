"""The first layers on the CPU and the others on a GPU, under Triton's interpreter where there is none: what the CPU's
engine gives. Few tokens, which the interpreter takes seconds for; `tests/gpu` has long prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from msgspec.structs import replace

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.config import ServerConfig
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kv.cache import KvCache
from moeserve.kv.layout import KvLayout
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import ExpertUse, NewSeq, Row
from moeserve.models.blocks.cpu.decoder import CpuDecoder
from moeserve.models.loading.cpu_loader import CpuLoader
from moeserve.models.open import open_dummy_model
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.worker.engines.cpu.engine import launch
from moeserve.worker.engines.gpu.cpu_stage import CpuStage
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import Sequences, StepLayout
from tests.gpu.driver import GREEDY, SCORED, Driver, small_config
from tests.support.models.model_header import qwen3moe, write_header

LAYERS, EXPERTS = 3, 4
PROMPT = [3, 1, 4]
OTHER = [3, 1, 5]  # begins alike


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    shape = qwen3moe(
        hidden_size=128,
        num_layers=LAYERS,
        num_heads=1,
        num_kv_heads=1,
        head_dim=128,
        num_experts=EXPERTS,
        top_k=2,
        expert_width=128,
        context_length=128,
        vocab_size=64,
    )
    write_header(path, shape, lambda *_: Type.Q8_0)
    return path


def config_of(model: Path, **options: object) -> ServerConfig:
    return small_config(
        model, load_format="dummy", threads=1, max_num_seqs=2, max_num_batched_tokens=4, max_model_len=64,
        max_total_tokens=128, **options,
    )  # fmt: skip


def on_gpu(model: Path, **options: object) -> Runner:
    config = config_of(model, **options)
    return load_gpu_runner(config, open_dummy_model(model), lambda *_: None, torch.device(DEVICE), Start())


def talks(runner: Runner) -> list[TokenLogprob]:
    """Chunks, a sequence on another's prefix beside it, and steps of two rows and of one."""
    driver = Driver(runner)
    found: list[TokenLogprob] = []
    first = driver.row(0, 2, sample=False)
    result = driver.step([NewSeq(0, _ints(PROMPT), 3, b"", SCORED)], [first])
    found += result.prompt_logprobs[0]
    new = NewSeq(1, _ints(OTHER), 3, first.kv_slots, GREEDY)
    for at in (2, 3):
        rows = [driver.row(0, 1, sample=True), replace(driver.row(1, 1, sample=True), start=at)]
        found += _sampled(driver.step([new] if at == 2 else [], rows).sampled)
    found += _sampled(driver.step([], [driver.row(0, 1, sample=True)]).sampled)
    return found


def _ints(values: list[int]) -> bytes:
    return np.array(values, np.int32).tobytes()


def _sampled(entries: list) -> list[TokenLogprob]:  # type: ignore[type-arg]
    return [entry.logprob for entry in entries]


def test_the_same_bits_as_in_the_whole_model(tiny_model: Path) -> None:
    """All layers, as the first ones of a larger model: chunks, a cached prefix, what is counted."""
    stream, file = CpuStream(1), open_gguf(tiny_model)
    c = read_shape(file)
    whole, first = (
        CpuDecoder(c, weights, stream, KvCache(KvLayout(c), 64, range(c.num_layers)).layers, 32, 64)
        for weights in (
            CpuLoader(stream, file, c, lambda *_: None).load(),
            CpuLoader(stream, file, c, lambda *_: None).load_first(c.num_layers),
        )
    )
    part = CpuStage(stream, first)
    sequences = Sequences(2, 64)
    sequences.bind(NewSeq(0, _ints([5, 6, 7, 8]), 4, _ints([9, 3]), GREEDY))
    for start, slots in ((0, [9, 3]), (2, [11, 2])):  # the second pair behind a cached prefix
        layout = StepLayout([Row(0, start, 2, _ints(slots), True)])
        part.compute(layout, sequences)
        launch(layout, sequences, whole)
        stream.wait()
        assert torch.equal(part.x[:2], whole.x[:2])
    assert (part.expert_token_counts.sum(axis=1) == 4 * c.top_k).all()
    assert part.weight_bytes_read() == whole.weight_bytes_read()  # no head has been read


@pytest.mark.slow  # 35 seconds of CPU time
def test_in_mixed_steps_with_a_shared_prefix_and_experts_in_ram(model: Path) -> None:
    on_cpu = load_cpu_runner(config_of(model), lambda *_: None)
    split = on_gpu(model, n_gpu_layers=2, num_gpu_experts=1, gpu_prefill_token_threshold=1000)
    assert "with the last 2 of 3 layers and 2 of 12 experts" in split.ready().device
    expected, found = talks(on_cpu), talks(split)
    assert len(found) == len(expected) == 2 + 2 + 2 + 1
    for a, b in zip(found, expected, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=0.02)
        assert a.top_ids[0] == b.top_ids[0]
    assert (heat_of(split) == heat_of(on_cpu)).mean() > 0.9  # a close choice may fall otherwise
    assert heat_of(split).sum(axis=1).tolist() == [7 * 2] * LAYERS
    places = np.frombuffer(split.expert_use().on_gpu, np.uint8).reshape(LAYERS, EXPERTS)
    assert places.tolist() == [[0] * 4, [1, 0, 0, 0], [1, 0, 0, 0]]


@pytest.mark.slow  # 17 seconds of CPU time
def test_the_embedding_alone(model: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("- {match: token_embd, device: cpu}")
    split = on_gpu(model, placement_rules=str(rules))
    assert "with all but the embedding and 12 of 12 experts" in split.ready().device
    expected = Driver(load_cpu_runner(config_of(model), lambda *_: None)).score(0, PROMPT[:2], 4)
    for a, b in zip(Driver(split).score(0, PROMPT[:2], 4), expected, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=0.02)


def heat_of(runner: Runner) -> np.ndarray:
    use: ExpertUse = runner.expert_use()
    return np.frombuffer(use.tokens, np.int64).reshape(use.layers, use.experts)
