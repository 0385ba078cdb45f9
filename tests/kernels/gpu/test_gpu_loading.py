"""What a GPU worker refuses before its first step, under Triton's interpreter (on a GPU where there is one)."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout
from moeserve.models.loading.floats import read_floats
from moeserve.models.loading.gpu_loader import GpuLoader
from moeserve.models.loading.gpu_weights import GpuLatentAttention, GpuWeights
from moeserve.models.loading.pinned_panels import PinnedPanels
from moeserve.models.loading.ram_experts import load_ram_experts
from moeserve.models.open import open_dummy_model, open_folder
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import names as n
from moeserve.placement import ModelSizes, Placement, PlacementOptions, place
from moeserve.placement.gpu import Gpu
from moeserve.placement.rules import Rules
from moeserve.worker.loading.cpu.pool_start import open_stream
from moeserve.worker.loading.gpu.load_plan import plan_load
from moeserve.worker.loading.gpu.load_weights import load_weights
from moeserve.worker.loading.gpu.moving_experts import pinned_panels
from tests.gpu.driver import small_config
from tests.support.models.hugging_face_model import write_family
from tests.support.models.model_header import qwen3moe, write_header

STREAMED = "- {match: 'exps', decode: cpu, prefill: cuda}"
IN_RAM = "- {match: 'exps', device: cpu}"


@pytest.fixture
def header(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    write_header(path, qwen3moe(hidden_size=256, num_layers=1, num_experts=4, top_k=2,
                                           expert_width=256, context_length=128, vocab_size=128))  # fmt: skip
    return path


def placed(header: Path, rules: str) -> Placement:
    gguf = open_dummy_model(header)
    (header.parent / "rules.yaml").write_text(rules)
    options = PlacementOptions(rules=Rules.read(header.parent / "rules.yaml"), max_total_tokens=128)
    sizes = ModelSizes.of(gguf.tensors, KvLayout(read_shape(gguf)))
    return place(sizes, options, Gpu(GIB, 0))


@pytest.mark.parametrize("rules", [STREAMED, IN_RAM], ids=["a rule asks for it", "nobody asks for it"])
def test_experts_that_cannot_be_streamed(
    header: Path, rules: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory cannot be pinned; what a rule says must hold all the same."""

    def refused(*_: object) -> None:
        raise RuntimeError("error 2")

    monkeypatch.setattr("moeserve.worker.loading.gpu.moving_experts.PinnedPanels", refused)
    placement = placed(header, rules)
    assert placement.stream_bytes > 0
    config = small_config(header)
    device = torch.device(DEVICE)
    experts = load_ram_experts(
        open_stream(config),
        open_dummy_model(header),
        read_shape(open_dummy_model(header)),
        [placement.cpu_experts(0)],
        device,
        lambda *_: None,
    )
    if rules == STREAMED:
        with pytest.raises(
            ConfigError, match=r"rule 1 \(match: 'exps'.*prefill: cuda\) is impossible.*pinned \(error 2\)"
        ):
            pinned_panels(experts, placement, device)
        return
    with caplog.at_level(logging.WARNING):
        assert pinned_panels(experts, placement, device) is None
    assert "pinned (error 2)" in caplog.text


def test_what_was_pinned_before_a_failure_is_told_and_released(
    header: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver pins the first matrix only, as under WSL, where a part of the memory may be pinned."""
    source = open_dummy_model(header)
    stream, shape = open_stream(small_config(header)), read_shape(source)
    experts = load_ram_experts(stream, source, shape, [[0, 1, 2, 3]], torch.device(DEVICE), lambda *_: None)
    pinned: list[int] = []

    def pin(memory: torch.Tensor) -> int:
        if pinned:
            raise RuntimeError("error 2")
        pinned.append(memory.data_ptr())
        return memory.data_ptr()

    monkeypatch.setattr("moeserve.models.loading.pinned_panels.pin", pin)
    monkeypatch.setattr("moeserve.models.loading.pinned_panels.unpin", released := MagicMock())
    layer = experts.layers[0]
    assert layer is not None
    layers = [layer] * 40  # of 0.42 MiB each
    one, wanted = layer.gate.bytes >> 20, 40 * sum(matrix.bytes for matrix in layer.own_matrices) >> 20
    assert wanted > 10
    with pytest.raises(RuntimeError, match=rf"^error 2, after {one} of {wanted} MiB$"):
        PinnedPanels(layers, torch.device("cuda"))
    gc.collect()
    released.assert_called_once_with(pinned)


def test_unpacked_experts(header: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they hold: test_triton_large_batch.py."""
    wanted: list[tuple[Collection[int], torch.dtype, int]] = []

    def unpacked(
        weights: GpuWeights, layers: Collection[int], floats: torch.dtype, *, first: int
    ) -> GpuWeights:
        wanted.append((layers, floats, first))
        return replace(weights, layers=[])

    monkeypatch.setattr("moeserve.worker.loading.gpu.load_weights.with_unpacked_experts", unpacked)
    device = torch.device(DEVICE)
    config = small_config(header, load_format="dummy", unpacked_experts=1.0, max_num_batched_tokens=1024)
    plan = plan_load(config, open_dummy_model(header), device, None)
    assert load_weights(config, plan, lambda *_: None, device, None).on_gpu.layers == []
    assert wanted == [((0,), torch.bfloat16 if DEVICE == "cuda" else torch.float32, 0)]
    short = small_config(header, load_format="dummy", unpacked_experts=1.0, max_num_batched_tokens=512)
    with pytest.raises(
        ConfigError, match=r"^--unpacked-experts: only steps of more than 512 tokens use them"
    ):
        plan_load(short, open_dummy_model(header), device, None)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v2"])
def test_biases_of_latent_attention(tmp_path: Path, model_type: str) -> None:
    """They stand beside the rows of their matrices, with zeros beside those of q's own."""
    folder = tmp_path / "tiny"
    write_family(folder, model_type, num_hidden_layers=1, first_k_dense_replace=0, attention_bias=True)
    source = open_folder(folder)
    shape = read_shape(source)
    latent = shape.latent
    assert latent is not None
    mixer = GpuLoader(source, shape, torch.device(DEVICE), lambda *_: None).load([range(8)]).layers[0].mixer
    assert isinstance(mixer, GpuLatentAttention)

    def bias(part: str) -> torch.Tensor:
        return read_floats(source, n.bias_of_layer(0, part))

    first = bias(n.ATTN_Q_A) if latent.q_rank else torch.zeros(latent.q_rows)
    loaded = [matrix.bias for matrix in mixer.inputs if matrix.bias is not None]
    assert torch.equal(torch.cat(loaded).cpu(), torch.cat([first, bias(n.ATTN_KV_A_MQA)]))
    assert mixer.output.bias is not None
    assert torch.equal(mixer.output.bias.cpu(), bias(n.ATTN_OUTPUT))
