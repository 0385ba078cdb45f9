"""Architectures beyond Qwen3-MoE on the GPU engine, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.models.gpu_features import gpu_shape
from moeserve.models.open import open_model
from moeserve.models.registry import read_shape
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from tests.conftest import OWN_FIXTURES, family_models
from tests.gpu.driver import Driver, small_config
from tests.kernels.engines.model_engine import Fixture

SIZES = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "max_total_tokens": 128,
    "threads": 1,
}
PLACEMENTS = {
    "all on the GPU": {},
    "half of the experts in RAM": {"num_gpu_experts": 4, "gpu_prefill_token_threshold": 1000},
    "none on the GPU, streamed": {"num_gpu_experts": 0, "gpu_prefill_token_threshold": 1},
    "two layers on the GPU": {"n_gpu_layers": 2, "num_gpu_experts": 2, "gpu_prefill_token_threshold": 1000},
    "two dense layers on the GPU": {"n_gpu_layers": 2},
}
DENSE = ("all on the GPU", "two dense layers on the GPU")
MIXTURE = tuple(name for name in PLACEMENTS if name != "two dense layers on the GPU")
# A file of each family, and how many tokens its large step has: more than gpt-oss's window and Gemma's.
FAMILIES = {"gptoss-mxfp4": 40, "glm4moe-q4_k_m": 20, "minimaxm2-q4_k_m": 20, "qwen3-q4_k_m": 20,
            "qwen3next-q4_k_m": 20, "qwen35moe-q4_k_m": 20, "deepseek2-q4_k_m": 20, "gemma4-q4_k_m": 40,
            "minimaxm3-f16": 40, "kimilinear-f16": 20, "bailing3-f16": 20, "qwen4exp-f16": 20,
            "deepseek4-f16": 40, "glm5next-f16": 40}  # fmt: skip
CASES = [
    (OWN_FIXTURES / f"tiny-{file}.gguf", 20, name)
    for file in (
        *(
            "qwen2moe-q4_k_m",
            "bailing2-q4_k_m",
            "nemotronhmoe-f16",
            "nemotronhlatent-f16",
            "granitehybrid-f16",
        ),
        "lfm2moe-f16",
        "kimik3-f16",
        "bailing1-f16",
        "deepseek1-f16",
    )
    for name in MIXTURE
]
# A window and sinks; more tokens than the window has.
CASES += [(OWN_FIXTURES / "tiny-granitemoeswa-f16.gguf", 40, name) for name in MIXTURE]
# Feed-forwards first and one behind another, in layers of one block.
CASES += [(OWN_FIXTURES / "tiny-nemotronh-f16.gguf", 20, name) for name in DENSE]
# Mamba-2 beside attention.
CASES += [(OWN_FIXTURES / "tiny-falconh1-f16.gguf", 20, name) for name in DENSE]
# Norms behind blocks only; more tokens than the window has.
CASES += [(OWN_FIXTURES / "tiny-olmo3-f16.gguf", 40, name) for name in DENSE]
# Layers without attention, and one without a feed-forward either, which is the first on the GPU in one placement.
CASES += [(OWN_FIXTURES / "tiny-nemotronnas-f16.gguf", 20, name) for name in DENSE]
# Normalised embeddings; more tokens than the window has.
CASES += [(OWN_FIXTURES / "tiny-museglimmer-f16.gguf", 40, name) for name in DENSE]
# Layers with inputs of their own, of which the last two attend to the keys of the first two.
CASES += [(OWN_FIXTURES / "tiny-gemma4e-f16.gguf", 40, "all on the GPU")]
# Capped scores and logits.
CASES += [(OWN_FIXTURES / "tiny-gemma2-f16.gguf", 40, name) for name in DENSE]
CASES += [
    (OWN_FIXTURES / f"tiny-{file}.gguf", 20, name)
    for file in ("gemma3-q4_k_m", "ministral3-f16", "phi4mini-f16", "smollm3-f16")
    for name in DENSE
]
CASES += [
    (model, tokens, name)
    for file, tokens in FAMILIES.items()
    for model in family_models(file.partition("-")[0])
    if model.stem == f"tiny-{file}"
    for name in (DENSE if file.startswith("qwen3-") else MIXTURE)
]


def errors(runner: Runner, fixture: Fixture, chunk: int) -> torch.Tensor:
    """Distances of `chunk` tokens' log-probabilities, computed in one step, from Hugging Face's in float32."""
    tokens, truth = fixture.tokens[-1][:chunk], fixture.truth[-1].log_softmax(-1)
    found = Driver(runner).score(0, tokens, chunk)[: chunk - 1]
    expected = [truth[i, token].item() for i, token in enumerate(tokens[1:])]
    return torch.tensor([abs(a.logprob - b) for a, b in zip(found, expected, strict=True)])


@pytest.mark.slow  # three minutes of CPU time each
@pytest.mark.parametrize(
    ("model", "tokens", "placement"), CASES, ids=[f"{model.stem}, {name}" for model, _, name in CASES]
)
def test_as_near_the_truth_as_the_way_of_computing_allows(
    model: Path, tokens: int, placement: str, request: pytest.FixtureRequest
) -> None:
    """Small batches round activations to int8, as experts in RAM do; larger ones keep floats, here of 32 bits."""
    if model.stem == "tiny-gemma4e-f16":
        request.applymarker(pytest.mark.xfail(reason="0.0023 in the large step, as on the CPU", strict=False))
    fixture, options = Fixture.load(model, model.parent), PLACEMENTS[placement]
    length = gpu_shape(read_shape(open_model(model)), None).context_length
    sizes = SIZES | options | {"max_model_len": min(SIZES["max_model_len"], length)}
    config = small_config(model, **sizes)
    runner = load_gpu_runner(config, open_model(model), lambda *_: None, torch.device(DEVICE), Start())
    assert errors(runner, fixture, 5).median() < 0.1
    large = errors(runner, fixture, tokens)
    keeps_floats = placement in ("all on the GPU", "none on the GPU, streamed")
    assert large.median() < (2e-3 if keeps_floats else 0.1)
    assert isinstance(runner.engine, GpuEngine)
    for n in (5, tokens):  # as a start on a GPU times them
        runner.engine.dummy_steps.prompt(n, runner.engine.streaming.part(n))()
