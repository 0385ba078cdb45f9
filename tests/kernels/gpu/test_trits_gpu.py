"""A model whose matrices are all of base-3 digits on the GPU engine, under Triton's interpreter where there is no GPU:
embedding, head, dense matrices, router, experts on the GPU and in RAM, in decode and in prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeserve.kernels.planes import empty_planes
from moeserve.models.sources.gguf import open_gguf
from moeserve.placement.sizes import plane_bytes
from moeserve.quantization.reference import dequantize
from tests.kernels.engines.model_engine import Engine
from tests.kernels.gpu.gpu_logits import load, logits_of
from tests.kernels.operations import stream_of
from tests.kernels.weights import Type
from tests.support.models.model_header import qwen3moe, write_header, write_weights

SHAPE = qwen3moe(
    256, 1, num_heads=4, num_kv_heads=2, head_dim=64, num_experts=4, top_k=2, expert_width=256, vocab_size=320
)
TOKENS = [7 * i % 300 for i in range(20)]
PLACEMENTS = {
    "all on the GPU": {},
    "half of the experts in RAM": {"num_gpu_experts": 2, "gpu_prefill_token_threshold": 1000},
    "none on the GPU, streamed": {"num_gpu_experts": 0, "gpu_prefill_token_threshold": 1},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file, and one of the same values in F32."""
    trits, floats = (tmp_path_factory.mktemp("trits") / f"{name}.gguf" for name in ("trits", "floats"))
    write_header(trits, SHAPE, lambda *_: Type.TQ1_0)
    write_weights(trits)
    write_header(floats, SHAPE, lambda *_: Type.F32)
    source, target = open_gguf(trits), open_gguf(floats, has_tensors=False)
    with floats.open("r+b") as file:
        for name, tensor in target.tensors.items():
            file.seek(tensor.offset)
            file.write(dequantize(source.tensors[name].type, source.data(name)).tobytes())
    return trits, floats


@pytest.mark.slow  # 20 s of CPU time each
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_gpu_computes_what_its_values_are(placement: str, models: tuple[Path, Path]) -> None:
    """Small batches round activations to int8, larger ones keep floats."""
    trits, floats = models
    truth = Engine(stream_of("plain"), floats).logits(np.array(TOKENS)).log_softmax(-1)
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64, "max_total_tokens": 64}
    runner = load(trits, **sizes, **PLACEMENTS[placement])
    is_mixed = placement == "half of the experts in RAM"
    for count, chunk, most in ((2, 1, 0.1), (20, 20, 0.1 if is_mixed else 5e-3)):
        found = logits_of(runner, 0, TOKENS[:count], chunk).log_softmax(-1)
        assert (found - truth[:count]).abs().median() < most


def test_memory_is_the_files_but_for_a_word_of_each_scale(models: tuple[Path, Path]) -> None:
    source = open_gguf(models[0])
    for tensor in source.tensors.values():
        if int(tensor.type) == Type.TQ1_0:
            assert empty_planes(tensor.type, tensor.shape, "meta").nbytes == plane_bytes(tensor)
            assert tensor.nbytes < plane_bytes(tensor) <= 1.04 * tensor.nbytes
