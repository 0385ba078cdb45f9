"""Numbers of a file's header that a family reads for itself are range-checked before anything is allocated by them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from moeserve.models.errors import ModelError
from moeserve.models.registry import read_checked_shape, read_shape
from moeserve.models.sources.gguf import open_gguf
from tests.conftest import OWN_FIXTURES, family_models
from tests.support.models.changed_header import with_number

KIMI = OWN_FIXTURES / "tiny-kimilinear-f16.gguf"
NEMOTRON = OWN_FIXTURES / "tiny-nemotronhmoe-f16.gguf"
GRANITE = OWN_FIXTURES / "tiny-granitehybrid-f16.gguf"
HUGE = 1 << 31


def assert_refused(path: Path, cause: str) -> None:
    with pytest.raises(ModelError, match=cause):
        read_checked_shape(open_gguf(path))


@pytest.mark.parametrize(
    ("key", "value", "cause"),
    [
        ("kda.head_dim", HUGE, "is 2147483648; 1 to 1024 is supported"),
        ("kda.head_dim", 32, r"tensor 'blk.0.attn_q.weight' has shape \[128, 128\]"),
        ("ssm.conv_kernel", 1, "is 1; 2 to 16 is supported"),
        ("ssm.conv_kernel", 5, r"tensor 'blk.0.ssm_conv1d_q.weight' has shape \[128, 1, 4\]"),
        ("attention.head_count", HUGE, "is 2147483648; 1 to 1024 is supported"),
        ("attention.kv_lora_rank", 0, "is 0; 1 to 1024 is supported"),
        ("attention.key_length", 191, "is 191; 192 to 192 is supported"),
        ("attention.key_length_mla", 64, "is 64; 65 to 2048 is supported"),
        ("attention.value_length_mla", HUGE, "is 2147483648; 1 to 2048 is supported"),
        ("rope.dimension_count", 63, "an even number is supported"),
        ("rope.dimension_count", HUGE, "is 2147483648; 2 to 1024 is supported"),
        ("expert_shared_count", HUGE, "is 2147483648; 0 to 64 is supported"),
    ],
)
def test_kimi_linear(tmp_path: Path, key: str, value: int, cause: str) -> None:
    assert_refused(with_number(KIMI, tmp_path / "model.gguf", key, value), cause)


def test_kimi_linear_without_a_layer_that_attends(tmp_path: Path) -> None:
    data = bytearray(KIMI.read_bytes())
    key = b"attention.head_count_kv"
    struct.pack_into("<I", data, data.index(key) + len(key) + 4 + 4 + 8 + 3 * 4, 0)  # behind types and length
    (tmp_path / "model.gguf").write_bytes(data)
    assert_refused(tmp_path / "model.gguf", "has no attention layer")


@pytest.mark.parametrize(
    ("key", "value", "cause"),
    [
        ("ssm.group_count", 3, "is 3; it must divide the 4 value heads"),
        ("ssm.time_step_rank", HUGE, "is 2147483648; 2 to 1024 is supported"),
        ("ssm.inner_size", 130, "is 130; the 4 value heads must divide it"),
        ("ssm.state_size", 64, r"tensor 'blk.0.ssm_in.weight' has shape \[388, 64\]"),
        ("ssm.conv_kernel", 3, r"tensor 'blk.0.ssm_conv1d.weight' has shape \[256, 4\]"),
        ("attention.key_length", HUGE, "is 2147483648; 2 to 1024 is supported"),
        ("attention.value_length", 32, "is 32; 64 to 64 is supported"),
        ("expert_shared_feed_forward_length", 32, r"tensor 'blk.1.ffn_up_shexp.weight' has shape \[96, 64\]"),
    ],
)
def test_nemotron(tmp_path: Path, key: str, value: int, cause: str) -> None:
    assert_refused(with_number(NEMOTRON, tmp_path / "model.gguf", key, value), cause)


@pytest.mark.parametrize(
    ("key", "layer", "value", "cause"),
    [
        ("attention.head_count_kv", 3, 0, "has no attention layer"),
        ("attention.head_count_kv", 1, 1, "are both set in layer 1, which has one block"),
        ("feed_forward_length", 1, HUGE, "has -?2147483648; 0 to 1048576 is supported"),
    ],
)
def test_nemotrons_layers(tmp_path: Path, key: str, layer: int, value: int, cause: str) -> None:
    data = bytearray(NEMOTRON.read_bytes())
    at = data.index(key.encode()) + len(key) + 4 + 4 + 8  # behind types and length
    struct.pack_into("<I", data, at + 4 * layer, value)
    (tmp_path / "model.gguf").write_bytes(data)
    assert_refused(tmp_path / "model.gguf", cause)


@pytest.mark.parametrize(
    ("key", "value", "cause"),
    [
        ("ssm.inner_size", HUGE, "is 2147483648; 1 to 1048576 is supported"),
        ("ssm.state_size", 64, r"tensor 'blk.0.ssm_in.weight' has shape \[324, 64\]"),
        ("expert_used_count", 9, "is 9; 1 to 8 is supported"),
        ("feed_forward_length", 64, r"tensor 'blk.0.ffn_gate_exps.weight' has shape \[8, 32, 64\]"),
    ],
)
def test_granite_hybrid(tmp_path: Path, key: str, value: int, cause: str) -> None:
    assert_refused(with_number(GRANITE, tmp_path / "model.gguf", key, value), cause)


def test_a_granite_hybrid_that_rotates_is_refused(tmp_path: Path) -> None:
    data, key = bytearray(GRANITE.read_bytes()), b"rope.scaling.finetuned"
    data[data.index(key) + len(key) + 4] = 1  # behind the type
    (tmp_path / "model.gguf").write_bytes(data)
    assert_refused(tmp_path / "model.gguf", "attention without positions is supported")


@pytest.mark.parametrize(
    ("key", "value", "cause"),
    [
        ("attention.indexer.top_k", 0, "is 0; 2 to 4096 is supported"),
        ("attention.indexer.head_count", 3, "is 3; only 2, as many as KV heads, is supported"),
        ("attention.indexer.key_length", 16, "is 16; 32 to 1024 is supported"),
        ("attention.indexer.local_blocks", 0, "is 0; 1 to 2 is supported"),
        ("attention.indexer.local_blocks", 3, "is 3; 1 to 2 is supported"),
        ("attention.indexer.block_size", HUGE, "is 2147483648; 1 to 65536 is supported"),
        ("rope.dimension_count", 65, "is 65; 2 to 64 is supported"),
    ],
)
@pytest.mark.parametrize("model", family_models("minimaxm3"), ids=lambda model: model.stem)
def test_minimax_m3(tmp_path: Path, model: Path, key: str, value: int, cause: str) -> None:
    assert_refused(with_number(model, tmp_path / "model.gguf", key, value), cause)


@pytest.mark.parametrize("model", family_models("minimaxm3"), ids=lambda model: model.stem)
def test_minimax_m3_without_an_indexer_is_served_up_to_the_blocks_that_it_would_choose(
    tmp_path: Path, model: Path
) -> None:
    """As llama.cpp converted it before it supported the indexer: its tensors are in no layer."""
    path = with_number(model, tmp_path / "model.gguf", "attention.indexer.top_k", 7)
    assert read_checked_shape(open_gguf(path)).context_length == 4096
    data = path.read_bytes().replace(b".indexer.q_proj.", b".indexxx.q_proj.")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="has no place in architecture 'minimax-m3'"):
        read_checked_shape(open_gguf(path))
    assert read_shape(open_gguf(path)).context_length == 7 * 16
