"""A new architecture is one ModelFamily: with nothing else said, files, sizes, placement and both engines have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.config.units import GIB
from moeserve.kv.layout import KvLayout
from moeserve.models.attention import AttentionShape
from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelFamily
from moeserve.models.open import open_model
from moeserve.models.registry import FAMILIES, read_checked_shape, read_shape, registered
from moeserve.models.sources.gguf import open_gguf
from moeserve.placement import Gpu, ModelSizes, PlacementOptions, place
from moeserve.placement.sizes import plane_bytes
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from tests.gpu.driver import Driver, small_config
from tests.kernels.engines.model_engine import Engine
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse
from tests.support.models.toy_architecture import model_file, reference
from tests.support.models.toy_architecture.family import FAMILY
from tests.support.models.toy_architecture.model_file import (
    EXPERTS,
    LAYERS,
    Weights,
    random_weights,
    write_model,
)

TOKENS = [(37 * i * i + 11 * i) % model_file.VOCAB for i in range(40)]


@pytest.fixture
def toy() -> Iterator[ModelFamily]:
    with registered(FAMILY) as family:
        yield family


@pytest.fixture(params=[np.float32, np.float16], ids=["F32", "F16"])
def weights(request: pytest.FixtureRequest) -> Weights:
    return random_weights(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "toy.gguf", random_weights())


# ---------------------------------------------------------------- registry


def test_the_registry_reads_it(toy: ModelFamily, path: Path) -> None:
    shape = read_checked_shape(open_model(path))
    (layer,) = set(shape.layers)
    assert (shape.architecture, shape.num_layers, shape.vocab_size) == ("toymoe", LAYERS, model_file.VOCAB)
    assert isinstance(layer.attention, AttentionShape)
    assert (layer.attention.qk_norm, layer.attention.qkv_bias) == ("full", False)
    assert layer.moe is not None
    assert (layer.moe.router.normalize, layer.moe.router.scale) == (False, model_file.SCALE)
    assert layer.moe.shared is not None
    assert (layer.moe.shared.width, layer.moe.shared.is_gated) == (model_file.SHARED_WIDTH, False)


def test_it_is_there_only_within(path: Path) -> None:
    with registered(FAMILY):
        assert FAMILIES["toymoe"] is FAMILY
        with pytest.raises(ValueError, match="'toymoe' is registered already"), registered(FAMILY):
            pass
        assert FAMILIES["toymoe"] is FAMILY
    assert "toymoe" not in FAMILIES
    with pytest.raises(ModelError, match="architecture 'toymoe' is not supported; supported are qwen3moe"):
        read_shape(open_model(path))


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {n: values for n, values in weights.items() if n != name}


def with_vector(name: str, size: int) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: np.ones(size, np.float32)}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (without("blk.1.ffn_up_shexp.weight"), "'blk.1.ffn_up_shexp.weight' is missing"),
        (without("blk.0.attn_k_norm.weight"), "'blk.0.attn_k_norm.weight' is missing"),
        (with_vector("blk.0.attn_q.bias", 128), "'blk.0.attn_q.bias' has no place in architecture 'toymoe'"),
        (
            with_vector("blk.1.ffn_gate_inp_shexp.weight", 96),
            "'blk.1.ffn_gate_inp_shexp.weight' has no place",
        ),
        (with_vector("blk.0.attn_q_norm.weight", 32), r"shape \[32\] .*\[128\] is expected"),
    ],
    ids=["no shared up", "no k norm", "a bias", "a shared gate", "norm of one head"],
)
def test_tensors_are_exactly_the_shapes(
    toy: ModelFamily, tmp_path: Path, change: Callable[[Weights], Weights], cause: str
) -> None:
    changed = write_model(tmp_path / "toy.gguf", change(random_weights()))
    with pytest.raises(ModelError, match=cause):
        read_checked_shape(open_model(changed))


# ---------------------------------------------------------------- placement


def test_sizes_and_placement(toy: ModelFamily, path: Path) -> None:
    source = open_gguf(path)
    shape = read_checked_shape(source)
    sizes = ModelSizes.of(source.tensors, KvLayout(shape))
    dense = [t for name, t in source.tensors.items() if name.startswith("blk.1.") and "exps" not in name]
    assert any("shexp" in tensor.name for tensor in dense)
    assert sizes.layers[1].dense.cpu == sum(t.nbytes for t in dense)
    assert sizes.layers[1].dense.cuda == sum(plane_bytes(t) for t in dense)
    assert sizes.layers[1].expert.cpu == 3 * model_file.WIDTH * model_file.HIDDEN * 4

    options = PlacementOptions(most_kv_tokens=256)
    roomy = place(sizes, options, Gpu(GIB, 0))
    assert [len(layer.gpu_experts) for layer in roomy.layers] == [EXPERTS] * LAYERS
    assert roomy.gpu_weight_bytes == sum(plane_bytes(t) for t in source.tensors.values())
    nowhere = place(sizes, options, None)
    assert nowhere.cpu_weight_bytes == sum(t.nbytes for t in source.tensors.values())


# ---------------------------------------------------------------- what is computed


@pytest.mark.parametrize("isa", ISAS)
def test_the_cpu_engine_computes_it(toy: ModelFamily, tmp_path: Path, weights: Weights, isa: str) -> None:
    engine = Engine(stream_of(isa), write_model(tmp_path / "toy.gguf", weights))
    # K, V and what attention reads are held in 16 bits; all else here is float32.
    assert nmse(engine.logits(TOKENS), reference.logits(weights, TOKENS)) < 1e-6


@pytest.mark.parametrize("isa", ISAS)
def test_chunks_and_threads_do_not_change_a_bit(toy: ModelFamily, path: Path, isa: str) -> None:
    whole = Engine(stream_of(isa), path).logits(TOKENS)
    other = Engine(stream_of(isa, 3), path, in_place=True)
    for chunk in (1, 7, 33):
        assert torch.equal(other.logits(TOKENS, chunk), whole)


def logprob_errors(driver: Driver, weights: Weights, tokens: list[int], chunk: int) -> torch.Tensor:
    """Errors of the log-probabilities of the tokens themselves, and of the token that was chosen after them."""
    truth = reference.logits(weights, tokens).log_softmax(-1)
    found = driver.score(0, tokens, chunk)
    assert [f.token_id for f in found] == [*tokens[1:], int(truth[-1].argmax())]
    return torch.tensor(
        [abs(f.logprob - row[f.token_id].item()) for f, row in zip(found, truth, strict=True)]
    )


def test_a_worker_on_the_cpu_serves_it(toy: ModelFamily, path: Path) -> None:
    runner = load_cpu_runner(small_config(path, threads=2, max_model_len=64), lambda *_: None)
    assert logprob_errors(Driver(runner), random_weights(), TOKENS, 13).max() < 0.01


GPU_SIZES = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "max_total_tokens": 128,
    "threads": 1,
}


def gpu_driver(path: Path, options: dict[str, object]) -> Driver:
    config = small_config(path, **(GPU_SIZES | options))
    return Driver(load_gpu_runner(config, open_model(path), lambda *_: None, torch.device(DEVICE), Start()))


@pytest.mark.slow  # 40 s of CPU time under Triton's interpreter
def test_the_gpu_engine_computes_it(toy: ModelFamily, path: Path) -> None:
    """A step of four tokens, then one of one: the kernels of small batches."""
    driver = gpu_driver(path, {"max_num_seqs": 1})  # what is captured beforehand is most of the time
    assert logprob_errors(driver, random_weights(), TOKENS[:5], 4).max() < 0.02


PLACEMENTS = {
    "all on the GPU": {},
    "some experts in RAM": {"num_gpu_experts": 2, "gpu_prefill_token_threshold": 1000},
    "experts in RAM, streamed": {"num_gpu_experts": 0, "gpu_prefill_token_threshold": 1},
    "a layer in RAM": {"n_gpu_layers": 1, "gpu_prefill_token_threshold": 1000},
}


@pytest.mark.slow  # up to a minute of CPU time each, under Triton's interpreter
@pytest.mark.parametrize("options", PLACEMENTS.values(), ids=list(PLACEMENTS))
def test_the_gpu_engine_computes_it_wherever_it_lies(
    toy: ModelFamily, path: Path, options: dict[str, object]
) -> None:
    """Many rows, which tiles of tensor cores take, then a few and one alone, which other kernels do."""
    driver, tokens = gpu_driver(path, options), TOKENS[:20]
    assert logprob_errors(driver, random_weights(), tokens, 20).max() < 0.02
    assert logprob_errors(driver, random_weights(), tokens[:7], 3).max() < 0.02
