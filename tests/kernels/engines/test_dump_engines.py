"""Dumps of the GPU's worker beside the CPU's: the same tensors, with experts anywhere. Under Triton's interpreter, on a
GPU where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from gguf.constants import GGMLQuantizationType as Type

from moeserve.cli.compare_dumps.compare import Tolerances, compare
from moeserve.cli.compare_dumps.reader import Dump
from moeserve.config import ServerConfig
from moeserve.messages.sampling import SamplingParams
from moeserve.models.open import open_dummy_model, open_model
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from tests.gpu.driver import Driver, small_config
from tests.support.models.hugging_face_model import write_family
from tests.support.models.model_header import qwen3moe, write_header

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A header: 2 layers of 4 experts, of which a token takes 2. A program of the interpreter takes milliseconds."""
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    shape = qwen3moe(hidden_size=32, num_layers=2, num_heads=1, num_kv_heads=1, head_dim=32, num_experts=4,
        top_k=2, expert_width=32, context_length=128, vocab_size=32,
    )  # fmt: skip
    write_header(path, shape, lambda name, _: Type.F32 if "gate_inp" in name else Type.F16)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "threshold", "tokens", "answers"),
    [
        (2, 1000, 2, 1),
        (4, 1000, 2, 2),
        (2, 1000, 17, 2),
        (2, 1, 17, 1),
    ],
    ids=["shared", "all on the GPU", "shared, many rows", "streamed"],
)
def test_both_engines_dump_the_same(
    small: Path, tmp_path: Path, experts: int, threshold: int, tokens: int, answers: int
) -> None:
    def config(name: str, **options: object) -> ServerConfig:
        return small_config(
            small, load_format="dummy", threads=1, max_num_seqs=1, max_num_batched_tokens=20, max_model_len=64,
            max_total_tokens=128, debug_dump=str(tmp_path / name), **options,
        )  # fmt: skip

    gpu = load_gpu_runner(
        config("gpu", num_gpu_experts=experts, gpu_prefill_token_threshold=threshold),
        open_dummy_model(small), lambda *_: None, torch.device(DEVICE), Start(),
    )  # fmt: skip
    assert not any((tmp_path / "gpu").iterdir()), "neither capture nor calibration is dumped"
    prompt = [(7 * i + 3) % 32 for i in range(tokens)]
    for runner in (load_cpu_runner(config("cpu"), lambda *_: None), gpu):
        Driver(runner).generate(0, prompt, answers, GREEDY)
    result = compare(Dump(tmp_path / "cpu"), Dump(tmp_path / "gpu"), Tolerances(0.02, 3.0))
    assert result.first is None
    assert len(result.pairs) == tokens + answers - 1
    assert {cell.rows for place, cell in result.cells.items() if place.layer is not None} == {
        len(result.pairs)
    }
    assert result.same_top == answers


# What differs from SETTINGS for a model that the interpreter computes in seconds.
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 32, "moe_intermediate_size": 32,
}  # fmt: skip
OF_FAMILY: dict[str, dict[str, object]] = {
    "qwen3": {},
    "glm4_moe": {"head_dim": 64, "n_routed_experts": 4, "num_experts": 4, "n_group": 2, "topk_group": 1,
                 "n_shared_experts": 1},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
                    "attention_bias": True},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
                    "attention_bias": True, "first_k_dense_replace": 1},
    "minimax_m2": {"head_dim": 64, "num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 2},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OF_FAMILY)
def test_families_are_the_same_on_both_engines(tmp_path: Path, model_type: str) -> None:
    """Half of the experts in RAM, where there are any; more tokens than gpt-oss's window."""
    folder = tmp_path / "model"
    write_family(folder, model_type, torch.float16, **(SMALL | OF_FAMILY[model_type]))

    def config(name: str, **options: object) -> ServerConfig:
        return small_config(
            folder, threads=1, max_num_seqs=1, max_num_batched_tokens=4, max_model_len=16, max_total_tokens=64,
            debug_dump=str(tmp_path / name), **options,
        )  # fmt: skip

    experts: dict[str, object] = {} if model_type == "qwen3" else {"num_gpu_experts": 2}
    gpu = load_gpu_runner(
        config("gpu", gpu_prefill_token_threshold=1000, **experts),
        open_model(folder), lambda *_: None, torch.device(DEVICE), Start(),
    )  # fmt: skip
    for runner in (load_cpu_runner(config("cpu"), lambda *_: None), gpu):
        Driver(runner).generate(0, [5, 700, 31, 9], 2, GREEDY)
    result = compare(Dump(tmp_path / "cpu"), Dump(tmp_path / "gpu"), Tolerances(0.02, 3.0))
    assert result.first is None
    assert len(result.pairs) == 5
