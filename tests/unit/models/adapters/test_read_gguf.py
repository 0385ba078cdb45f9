"""Adapters in GGUF files, as llama.cpp's converter writes them: the same as in PEFT's form, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moeserve.models.adapters.adapter import ProductKey
from moeserve.models.adapters.errors import AdapterError
from moeserve.models.adapters.open import open_adapter
from moeserve.models.adapters.products import products_of
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.sources.gguf import names as n
from tests.support.models.gguf_adapters import ATTENTION, Arrays, write
from tests.support.models.peft_files import GATE, SHAPE, Q
from tests.support.models.peft_files import write as write_peft

RANK = 2
DOWN = products_of(SHAPE, 0)[n.FFN_DOWN_EXPS]
RANDOM = np.random.default_rng(3)
EXPERTS = {
    "blk.0.ffn_down_exps.weight.lora_a": RANDOM.normal(size=(DOWN.experts, RANK, DOWN.cols)).astype(
        np.float16
    ),
    "blk.0.ffn_down_exps.weight.lora_b": RANDOM.normal(size=(DOWN.experts, DOWN.rows, RANK)).astype(
        np.float16
    ),
}


def test_it_is_the_same_as_pefts(tmp_path: Path) -> None:
    ours = open_adapter("a", write(tmp_path / "a.gguf"), SHAPE).read()
    theirs = PeftAdapter("a", write_peft(tmp_path / "a"), SHAPE).read()
    assert ours.products.keys() == theirs.products.keys()
    for key, pair in theirs.products.items():
        assert np.array_equal(ours.products[key].a, pair.a)
        assert np.array_equal(ours.products[key].b, pair.b)


def test_each_expert_has_its_own(tmp_path: Path) -> None:
    found = open_adapter("a", write(tmp_path / "a.gguf", EXPERTS, alpha=0.0), SHAPE).read().products
    assert len(found) == DOWN.experts
    a, b = EXPERTS.values()
    last = found[ProductKey(0, n.FFN_DOWN_EXPS, DOWN.experts - 1)]
    assert np.array_equal(last.a, a[-1].astype(np.float32))
    assert np.array_equal(last.b, b[-1].astype(np.float32))  # an alpha of 0 is none: a scale of 1


@pytest.mark.parametrize("tensors", [ATTENTION, EXPERTS], ids=["one", "experts"])
def test_the_header_tells_the_size(tensors: Arrays, tmp_path: Path) -> None:
    checked = open_adapter("a", write(tmp_path / "a.gguf", tensors), SHAPE)
    assert checked.nbytes == checked.read().num_bytes


def test_the_key_is_of_the_content(tmp_path: Path) -> None:
    keys = [
        open_adapter("a", write(tmp_path / f"{i}.gguf", alpha=alpha), SHAPE).read().key
        for i, alpha in enumerate((8.0, 8.0, 9.0))
    ]
    assert keys[0] == keys[1] != keys[2]


def zeros(*shape: int, dtype: type = np.float32) -> npt.NDArray[Any]:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"blk.0.attn_norm.weight": zeros(4)}, "attn_norm.weight"),
        ({"blk.0.attn_q.weight.lora_a": zeros(RANK, Q.cols)}, "attn_q.weight.lora_a"),
        ({**ATTENTION, "blk.0.attn_q.weight.lora_b": zeros(Q.rows, RANK + 1)}, "attn_q.weight.lora_b"),
        ({**ATTENTION, "blk.0.attn_q.weight.lora_a": zeros(RANK, Q.cols, 2)}, "attn_q.weight.lora_a"),
        ({k.replace("blk.0", "blk.88"): v for k, v in ATTENTION.items()}, "layer 88"),
        ({k.replace("attn_q", "attn_q_norm"): v for k, v in ATTENTION.items()}, "attn_q_norm"),
        ({k.replace("attn_q", "ffn_gate_exps"): v for k, v in ATTENTION.items()}, str(GATE.cols)),
        ({k: v.astype(np.int32) for k, v in ATTENTION.items()}, "attn_q"),
        ({k: v * np.float32(np.inf) for k, v in ATTENTION.items()}, "not finite"),
    ],
)
def test_a_bad_tensor_is_refused_by_its_name(tensors: Arrays, named: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=named):
        open_adapter("a", write(tmp_path / "a.gguf", tensors), SHAPE).read()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kind": "model"}, r"general\.type"),
        ({"architecture": "llama"}, r"general\.architecture"),
        ({"form": "loha"}, r"adapter\.type"),
        ({"alpha": None}, r"adapter\.lora\.alpha"),
        ({"alpha": float("nan")}, r"adapter\.lora\.alpha"),
    ],
)
def test_a_key_that_does_not_fit_is_named(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=named):
        open_adapter("a", write(tmp_path / "a.gguf", **settings), SHAPE)
