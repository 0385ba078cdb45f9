"""Families that choose keys, on the GPU engine: under Triton's interpreter where there is no GPU. Contexts are longer
than the number of chosen keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.models.open import open_model
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from tests.gpu.driver import Driver, small_config
from tests.kernels.engines.model_engine import Engine
from tests.kernels.folders.folder_variants import edit_config
from tests.kernels.operations import ISAS, stream_of
from tests.support.models import minimaxm3_model
from tests.support.models.hugging_face_model import write_family

LENGTH, PROMPT = 26, 22
TOKENS = [(37 * i * i + 11 * i) % 4000 for i in range(LENGTH)]
BLOCK_TOKENS = [token % 600 for token in TOKENS]
SIZES = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 40,
    "max_total_tokens": 80,
    "threads": 1,
}
# Two dense layers, of which GLM-5's second uses the first one's choice: 8 keys of up to 26.
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "index_topk": 8, "n_group": 1,
                         "topk_group": 1, "routed_scaling_factor": 1.0}  # fmt: skip
OF_TYPE: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", "dense"]},
    "deepseek_v32": {},
}


@pytest.mark.slow  # half a minute of CPU time each
@pytest.mark.parametrize("model_type", OF_TYPE)
def test_a_prompt_and_an_answer_get_the_cpu_engines_logits(model_type: str, tmp_path: Path) -> None:
    """Steps of one token round activations to int8."""
    write_family(tmp_path, model_type, torch.float32, 7, **SMALL, **OF_TYPE[model_type])
    config, expected = small_config(tmp_path, **SIZES), cpu_logprobs(tmp_path, TOKENS)
    runner = load_gpu_runner(config, open_model(tmp_path), lambda *_: None, torch.device(DEVICE), Start())
    found = torch.tensor([entry.logprob for entry in Driver(runner).score(0, TOKENS, PROMPT)[:-1]])
    errors = (found - expected).abs()
    print(errors)
    assert errors[: PROMPT - 1].median() < 1e-3
    assert errors[: PROMPT - 1].max() < 1e-2
    assert errors[PROMPT - 1 :].max() < 0.1
    edit_config(tmp_path, index_topk=4000)
    assert (cpu_logprobs(tmp_path, TOKENS) - expected).abs()[8:].median() > 1e-2  # with all keys


def cpu_logprobs(model: Path, tokens: list[int]) -> torch.Tensor:
    """The CPU engine's logarithms of the probabilities of the tokens, but for the first."""
    found = Engine(stream_of(ISAS[-1]), model).logits(tokens).double().log_softmax(-1)
    return found[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


# Blocks of 4 keys: MiniMax-M3's heads choose 2 and the query's own, Flash-Next chooses 3. Layers without experts.
BLOCKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "minimax-m3": (
        minimaxm3_model,
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "minimax_m3_sparse"],
         "mlp_layer_types": ["dense", "dense"], "index_block_size": 4, "index_topk_blocks": 2},
    ),
}  # fmt: skip


@pytest.mark.slow  # a minute of CPU time
@pytest.mark.parametrize("family", BLOCKS)
def test_blocks_are_chosen_as_on_the_cpu(family: str, tmp_path: Path) -> None:
    module, changes = BLOCKS[family]
    path = tmp_path / "m.gguf"
    module.write_model(module.new_model(8, **changes), path, Type.F16)
    expected = cpu_logprobs(path, BLOCK_TOKENS)
    runner = load_gpu_runner(
        small_config(path, **SIZES), open_model(path), lambda *_: None, torch.device(DEVICE), Start()
    )
    found = torch.tensor([entry.logprob for entry in Driver(runner).score(0, BLOCK_TOKENS, PROMPT)[:-1]])
    errors = (found - expected).abs()
    print(errors)
    assert errors[: PROMPT - 1].median() < 1e-3
    assert errors[: PROMPT - 1].max() < 1e-2
    assert errors[PROMPT - 1 :].max() < 0.1
