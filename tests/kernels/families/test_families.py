"""Architectures beyond Qwen3-MoE on the CPU engine, beside Hugging Face's truth, transformers itself and llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.conftest import OWN_FIXTURES, family_models
from tests.kernels.engines.model_engine import (
    Engine,
    Fixture,
    assert_no_further_from_the_truth_than_llama_cpp,
)
from tests.kernels.families.transformers_logits import assert_is_what_transformers_computes
from tests.kernels.operations import COSTLY_ISAS, stream_of
from tests.support.models.hugging_face_model import write_family, write_published_qwen35, write_qwen2_moe
from tests.support.models.hugging_face_settings import FAMILIES as HUGGING_FACE_FAMILIES
from tests.support.nightly import nightly_after

if TYPE_CHECKING:
    pass

OWN = [
    *(
        OWN_FIXTURES / f"tiny-{name}-q4_k_m.gguf"
        for name in (
            *("qwen2moe", "qwen3next", "mixtral", "exaonemoe", "mimo2", "step35", "llama4"),
            *("bailing2", "gemma3"),
        )
    ),
    OWN_FIXTURES / "tiny-gemma4e-f16.gguf",
    OWN_FIXTURES / "tiny-kimilinear-f16.gguf",
    OWN_FIXTURES / "tiny-kimik3-f16.gguf",
    OWN_FIXTURES / "tiny-bailing3-f16.gguf",
    OWN_FIXTURES / "tiny-bailing1-f16.gguf",
    OWN_FIXTURES / "tiny-deepseek1-f16.gguf",
    OWN_FIXTURES / "tiny-nemotronhmoe-f16.gguf",
    OWN_FIXTURES / "tiny-granitehybrid-f16.gguf",
    OWN_FIXTURES / "tiny-lfm2moe-f16.gguf",
    OWN_FIXTURES / "tiny-ministral3-f16.gguf",
    OWN_FIXTURES / "tiny-phi4mini-f16.gguf",
    OWN_FIXTURES / "tiny-smollm3-f16.gguf",
    OWN_FIXTURES / "tiny-olmo3-f16.gguf",
    OWN_FIXTURES / "tiny-exaone4-f16.gguf",
    OWN_FIXTURES / "tiny-glm4-f16.gguf",
    OWN_FIXTURES / "tiny-gemma2-f16.gguf",
    OWN_FIXTURES / "tiny-nemotronnas-f16.gguf",
    OWN_FIXTURES / "tiny-museglimmer-f16.gguf",
    OWN_FIXTURES / "tiny-mellum-f16.gguf",
    OWN_FIXTURES / "tiny-granitemoeswa-f16.gguf",
    OWN_FIXTURES / "tiny-nemotronh-f16.gguf",
    OWN_FIXTURES / "tiny-nemotronhlatent-f16.gguf",
    OWN_FIXTURES / "tiny-falconh1-f16.gguf",
    OWN_FIXTURES / "tiny-falconh1norm-f16.gguf",
]
# Weights of 8 bits leave the error to the activations, which both engines round to int8 by 32 columns: over 203
# positions the medians are 1.06e-3 and 0.98e-3, a ratio of 1.08 with a 90% interval of 0.94 to 1.21: not met.
MISSED = pytest.mark.xfail(
    reason="1.01 to 1.08 times llama.cpp's median KL: the same rounding, another draw", strict=False
)
# The two of gpt-oss: ratios of 1.01 (0.84 to 1.12) and 1.01 (0.91 to 1.15) with vector instructions, 0.98 and 0.95
# without. Over 2,880 positions all three are 0.97 of llama.cpp's: docs/results/accuracy.md.
MISSING = ("tiny-qwen2moe-q8_0", "tiny-gptoss-mxfp4", "tiny-gptoss-q8_0")
FAMILIES = (
    "qwen2moe",
    "qwen3",
    "gptoss",
    "glm4moe",
    "minimaxm2",
    "qwen3next",
    "qwen35moe",
    "deepseek2",
    "gemma4",
    "llamadense",
    "mixtral",
    "qwen2",
    "qwen35",
    "qwen3vlmoe",
    "hyv3",
    "dots1",
    "olmoe",
    "ernie45moe",
    "exaonemoe",
    "granitemoe",
    "mistral4",
    "mimo2",
    "step35",
    "gemma4dense",
    "gemma4e",
    "hunyuanmoe",
    "llama4",
    "laguna",
    "afmoe",
    "kimilinear",
    "bailing3",
    "nemotronhmoe",
    "granitehybrid",
    "lfm2moe",
)  # as the files are named
NAMES = {model.name for model in OWN}
OTHERS = [model for family in FAMILIES for model in family_models(family) if model.name not in NAMES]
MODELS = [*OWN, *OTHERS]
# Floats take the longest, and have no rounding of their own that depends on the others of a step.
ALL_TYPES = [pytest.param(m, marks=pytest.mark.slow) if m.stem.endswith("f16") else m for m in MODELS]
# A tie of a router of mimo2 in F16 falls the other way at the tenth token without vector instructions, and later
# positions see its keys. Of 144 positions two or three have another first token: docs/results/accuracy.md.
TIES = pytest.mark.xfail(reason="ties that fall the other way", strict=False)
TIED = ("tiny-mimo2-f16", "tiny-gemma4e-q4_k_m", "tiny-afmoe-q4_k_m")
JUDGED = [
    pytest.param(m, marks=MISSED if m.stem in MISSING else TIES) if m.stem in MISSING + TIED else m
    for m in MODELS
]


@pytest.mark.parametrize("isa", COSTLY_ISAS)
@pytest.mark.parametrize("model", JUDGED, ids=lambda model: model.stem)
def test_no_further_from_the_truth_than_llama_cpp(model: Path, isa: str) -> None:
    assert_no_further_from_the_truth_than_llama_cpp(Fixture.load(model, model.parent), isa)


@pytest.mark.parametrize("isa", COSTLY_ISAS)
@pytest.mark.parametrize("model", ALL_TYPES, ids=lambda model: model.stem)
def test_chunks_and_threads_do_not_change_a_bit(model: Path, isa: str) -> None:
    tokens = Fixture.load(model, model.parent).tokens[-1]
    whole = Engine(stream_of(isa), model).logits(tokens)
    other = Engine(stream_of(isa, 3), model)
    for chunk in (1, 7, 33):
        assert torch.equal(other.logits(tokens, chunk), whole)


TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES.values(), ids=list(TYPES))
def test_a_folder_of_qwen2_moe_is_what_transformers_computes(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen2MoeForCausalLM

    write_qwen2_moe(tmp_path / "tiny-qwen2-moe", dtype)
    assert_is_what_transformers_computes(tmp_path / "tiny-qwen2-moe", Qwen2MoeForCausalLM, monkeypatch)


@pytest.mark.parametrize("dtype", nightly_after(1, [torch.bfloat16, torch.float32]), ids=str)
@pytest.mark.parametrize("model_type", nightly_after(12, HUGGING_FACE_FAMILIES))
def test_a_folder_of_another_family_is_what_transformers_computes(
    model_type: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_family(tmp_path / model_type, model_type, dtype)
    assert_is_what_transformers_computes(tmp_path / model_type, model, monkeypatch)


def test_a_qwen35_as_it_is_published_is_what_transformers_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With vision, which is left out, and the experts of a layer in two tensors."""
    model = write_published_qwen35(tmp_path / "tiny")
    assert_is_what_transformers_computes(tmp_path / "tiny", model, monkeypatch)
