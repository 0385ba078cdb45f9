"""A model's division among several GPUs: the ranks' shares together are the model, and each is a model by itself."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import ModelError
from moeserve.models.gpu_features import check_gpu_features, cpu_only_features
from moeserve.models.interface import ModelShape
from moeserve.models.open import open_dummy_model, open_model
from moeserve.models.ranks.rank_share import RankShare, cut_layers, share_of, stage_of, why_undivided
from moeserve.models.ranks.rank_source import RankSource
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import check_tensors, model_tensors
from moeserve.quantization.reference import dequantize
from tests.conftest import OWN_FIXTURES, TINY_MODEL, family_models
from tests.support.models.gemma_file import write_gemma
from tests.support.models.model_header import qwen3moe, write_header

NOT_DIVIDED = {"step35-q4_k_m": "gates", "mimo2-q4_k_m": "widths", "kimilinear-f16": "Kimi Delta Attention",
               "nemotronhmoe-f16": "Mamba-2", "granitehybrid-f16": "Mamba-2", "nemotronh-f16": "Mamba-2",
               "nemotronhlatent-f16": "Mamba-2", "falconh1-f16": "Mamba-2", "falconh1norm-f16": "Mamba-2",
               "lfm2moe-f16": "short convolutions", "bailing3-f16": "gates", "kimik3-f16": "gates",
               "gemma3-q4_k_m": "norms behind", "gemma2-f16": "norms behind", "olmo3-f16": "norms behind",
               "exaone4-f16": "norms behind", "glm4-f16": "norms behind", "gemma4e-f16": "norms behind",
               "nemotronnas-f16": "layers without", "museglimmer-f16": "norms behind"}  # fmt: skip
FILES = sorted(
    {*OWN_FIXTURES.glob("tiny-*.gguf")} - {OWN_FIXTURES / f"tiny-{name}.gguf" for name in NOT_DIVIDED}
)
FAMILIES = ("gptoss", "glm4moe", "minimaxm2", "deepseek2", "qwen3", "qwen35moe")
FILES += [model for family in FAMILIES for model in family_models(family)]
UNDIVIDED = family_models("gemma4")  # its layers are not divided, but each GPU may have some of them


def shares_of(path: Path, num_ranks: int) -> tuple[ModelSource, ModelShape, list[RankShare]]:
    source = open_model(path)
    shape = read_shape(source)
    return source, shape, [share_of(shape, source.tensors, rank, num_ranks) for rank in range(num_ranks)]


def matrix(source: ModelSource, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    tensor = source.tensors[name]
    data = source.data(name)
    assert data.nbytes == tensor.nbytes
    return dequantize(tensor.type, data.reshape(-1, tensor.type.block_bytes)).reshape(tensor.shape)


def test_what_only_the_cpu_computes_is_refused_by_name() -> None:
    source = open_model(TINY_MODEL)
    shape = replace(read_shape(source), centers_norms=True)
    found = cpu_only_features(shape)
    assert found == ["LayerNorm in layers that are not parallel"]
    with pytest.raises(ModelError, match=re.escape(f"({', '.join(found)}): run the model with --device cpu")):
        check_gpu_features(source, shape)
    assert shape.architecture in why_undivided(shape, 2)


@pytest.mark.parametrize(("name", "why"), NOT_DIVIDED.items())
def test_what_is_not_divided_is_refused_by_name(name: str, why: str) -> None:
    """Gates with a matrix of their own, values of another width than keys."""
    shape = read_shape(open_model(OWN_FIXTURES / f"tiny-{name}.gguf"))
    assert not cpu_only_features(shape)
    assert why in why_undivided(shape, 2)


def test_layers_with_inputs_of_their_own_are_on_one_gpu() -> None:
    source = open_model(OWN_FIXTURES / "tiny-gemma4e-f16.gguf")
    shape = read_shape(source)
    with pytest.raises(
        ValueError, match="gemma4 has layers with inputs of their own, which one GPU computes alone"
    ):
        stage_of(shape, source.tensors, 0, 2)
    bare = tuple(replace(layer, is_sandwiched=False) for layer in shape.layers)
    assert "attend to an earlier one's keys" in why_undivided(replace(shape, layers=bare), 2)
    own = tuple(replace(layer, mixer=shape.layers[0].mixer) for layer in bare)
    assert "inputs of their own" in why_undivided(replace(shape, layers=own), 2)


def test_latent_experts_are_not_divided() -> None:
    shape = read_shape(open_model(TINY_MODEL))
    moe = shape.layers[0].moe
    assert moe is not None
    layers = tuple(replace(layer, ffn=replace(moe, latent=32)) for layer in shape.layers)
    assert "latent experts" in why_undivided(replace(shape, layers=layers), 2)


def test_a_stage_begins_with_a_layer_whose_keys_all_of_it_can_reach() -> None:
    """Layers 2 and 3 attend to the keys of 0 and 1; then layer 3 alone does, to those of 2, which a stage has as its
    first."""
    source = open_model(OWN_FIXTURES / "tiny-gemma4e-f16.gguf")
    shape = replace(read_shape(source), layer_input_width=0)
    with pytest.raises(ValueError, match="4 layers, 4 of which attend, for 2 GPUs"):
        stage_of(shape, source.tensors, 0, 2)
    first, second = shape.layers[:2]
    assert isinstance(first.mixer, AttentionShape)
    last = replace(first, mixer=replace(first.mixer, kv_from=2))
    shape = replace(shape, layers=(first, second, first, last))
    assert [shape.needs_layer_before(index) for index in range(4)] == [False, False, False, True]
    stage = stage_of(shape, source.tensors, 1, 2)
    assert (stage.first_layer, [layer.kv_from for layer in stage.shape.layers]) == (2, [None, 0])


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_share_is_a_model(path: Path, num_ranks: int) -> None:
    source, shape, shares = shares_of(path, num_ranks)
    for share in shares:
        own = RankSource(source, share)
        check_tensors(share.shape, own)
        for name in share.slices:
            assert own.data(name).nbytes == own.tensors[name].nbytes
    for layer, of in enumerate(shape.layers):
        ids = [expert for share in shares for expert in share.experts[layer]]
        assert sorted(ids) == list(range(of.num_experts))
        widths = [share.shape.layers[layer].unrouted_width for share in shares]
        if layer in shares[0].whole_ffns:
            assert widths == [of.unrouted_width] * num_ranks
        else:
            assert sum(widths) == of.unrouted_width


@pytest.mark.parametrize("path", FILES[:3], ids=lambda path: path.stem)
def test_slices_put_together_are_the_tensor(path: Path) -> None:
    source, _, shares = shares_of(path, 2)
    owns = [RankSource(source, share) for share in shares]
    cut = [name for name in shares[0].slices if name in shares[1].slices]
    for name in cut:
        axis = -1 if shares[0].slices[name].is_columns else 0
        whole = np.concatenate([matrix(own, name) for own in owns], axis)
        assert np.array_equal(whole, matrix(source, name)), name


def test_attention_is_divided_by_whole_groups_of_heads() -> None:
    """4 heads, 2 KV heads of 128: a rank has 2 and 1, 256 columns of the output."""
    _, shape, shares = shares_of(TINY_MODEL, 2)
    for share in shares:
        assert share.divides_attention
        heads = share.shape.heads
        assert (heads.num_heads, shape.heads.num_heads) == (2, 4)
        assert share.shape.kv_width == shape.kv_width // 2
    columns = [share.slices[n.of_layer(0, n.ATTN_OUTPUT)] for share in shares]
    assert [(cut.start, cut.end) for cut in columns] == [(0, 256), (256, 512)]


def test_attention_stays_whole_where_the_blocks_of_its_output_do_not_divide() -> None:
    _, shape, shares = shares_of(TINY_MODEL, 4)  # 128 columns a rank: half a block of Q5_K
    assert not any(share.divides_attention for share in shares)
    assert all(share.shape.heads == shape.heads for share in shares)


def test_ranks_share_kv_heads_where_there_are_fewer(tmp_path: Path) -> None:
    """With 8 heads and 2 KV heads, 4 ranks have 2 heads each and one KV head, which two of them share."""
    header = tmp_path / "model.gguf"
    write_header(
        header,
        qwen3moe(256, num_layers=1, num_heads=8, num_kv_heads=2, head_dim=128, num_experts=4, top_k=2,
                 expert_width=256, vocab_size=64),
    )  # fmt: skip
    source = open_dummy_model(header)
    shape = read_shape(source)
    shares = [share_of(shape, source.tensors, rank, 4) for rank in range(4)]
    assert all(share.divides_attention for share in shares)
    assert all((s.shape.heads.num_heads, s.shape.kv_width) == (2, 128) for s in shares)
    keys = [share.slices[n.of_layer(0, n.ATTN_K)] for share in shares]
    assert [(cut.start, cut.end) for cut in keys] == [(0, 128), (0, 128), (128, 256), (128, 256)]


def test_experts_are_balanced_by_use() -> None:
    source = open_model(TINY_MODEL)
    shape = read_shape(source)
    counts = [[80, 70, 1, 1, 1, 1, 1, 1]] * shape.num_layers
    shares = [share_of(shape, source.tensors, rank, 2, counts) for rank in range(2)]
    for layer in range(shape.num_layers):
        assert [len(share.experts[layer]) for share in shares] == [4, 4]
        assert 0 in shares[0].experts[layer]
        assert 1 in shares[1].experts[layer]


def test_more_gpus_than_experts_are_refused() -> None:
    source = open_model(TINY_MODEL)
    with pytest.raises(ValueError, match="8 experts"):
        share_of(read_shape(source), source.tensors, 0, 16)


@pytest.mark.parametrize("path", FILES + UNDIVIDED, ids=lambda path: path.stem)
def test_stages_together_are_the_model(path: Path) -> None:
    """Each is a model of its own, whose tensors are the file's."""
    source = open_model(path)
    shape = read_shape(source)
    if sum(layer.attention is not None for layer in shape.layers) < 2:
        with pytest.raises(ValueError, match="1 of which attend"):
            stage_of(shape, source.tensors, 0, 2)
        return
    stages = [stage_of(shape, source.tensors, rank, 2) for rank in range(2)]
    assert tuple(layer for stage in stages for layer in stage.shape.layers) == shape.layers
    assert stages[1].first_layer == stages[0].shape.num_layers
    named = set()
    for stage in stages:
        own = RankSource(source, stage)
        check_tensors(stage.shape, own)
        for name, tensor in own.tensors.items():
            in_file = stage.name_in_model(name)
            named.add(in_file)
            assert (tensor.shape, tensor.type) == (
                source.tensors[in_file].shape,
                source.tensors[in_file].type,
            )
        last = n.of_layer(stage.shape.num_layers - 1, stage.shape.layers[-1].ffn_norm)
        assert np.array_equal(own.data(last), source.data(stage.name_in_model(last)))
    assert named.issuperset(model_tensors(shape))


def test_a_stage_lacks_what_only_other_layers_take(tmp_path: Path) -> None:
    """In Gemma 4 the layers with a window take no rope factors."""
    source = open_model(write_gemma(tmp_path / "gemma.gguf", GGMLQuantizationType.F32))
    stages = [stage_of(read_shape(source), source.tensors, rank, 2) for rank in range(2)]
    owns = [RankSource(source, stage) for stage in stages]
    for stage, own in zip(stages, owns, strict=True):
        check_tensors(stage.shape, own)
    assert [n.ROPE_FREQS in own.tensors for own in owns] == [False, True]


@pytest.mark.parametrize(
    ("sizes", "attends", "parts", "cuts"),
    [
        ([1, 1, 1, 1], [1, 1, 1, 1], 2, [0, 2, 4]),
        ([5, 1, 1, 1], [1, 1, 1, 1], 2, [0, 1, 4]),
        ([1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 1], 2, [0, 3, 6]),
        ([1, 1, 1, 9, 1, 1], [0, 0, 0, 1, 0, 1], 2, [0, 4, 6]),
        ([2, 2, 2, 2, 2], [1] * 5, 4, [0, 2, 3, 4, 5]),
    ],
)
def test_where_layers_are_cut(sizes: list[int], attends: list[bool], parts: int, cuts: list[int]) -> None:
    """The largest part is as small as can be, and every part has a layer that attends."""
    found = cut_layers(sizes, attends, parts)
    largest = max(sum(sizes[a:b]) for a, b in pairwise(found))
    assert largest == max(sum(sizes[a:b]) for a, b in pairwise(cuts))
    assert all(any(attends[a:b]) for a, b in pairwise(found))
    assert (found[0], found[-1], len(found)) == (0, len(sizes), parts + 1)


def test_a_layer_that_needs_the_one_before_begins_no_part() -> None:
    starts = [True, False, False, True, False]
    assert cut_layers([1] * 5, [True] * 5, 2, starts) == [0, 3, 5]
    with pytest.raises(ValueError, match="5 layers"):
        cut_layers([1] * 5, [True] * 5, 3, starts)


def test_more_gpus_than_layers_that_attend_are_refused() -> None:
    source = open_model(TINY_MODEL)
    shape = read_shape(source)
    with pytest.raises(ValueError, match=f"{shape.num_layers} layers"):
        stage_of(shape, source.tensors, 0, shape.num_layers + 1)
    with pytest.raises(ValueError, match="1 of which attend"):
        cut_layers([1, 1], [False, True], 2)


def test_counts_of_a_share_are_those_of_its_experts() -> None:
    source = open_model(TINY_MODEL)
    shape = read_shape(source)
    counts = [[100 * layer + expert for expert in range(8)] for layer in range(shape.num_layers)]
    second = stage_of(shape, source.tensors, 1, 2)
    assert second.counts_of(counts) == counts[second.first_layer :]
    half = share_of(shape, source.tensors, 1, 2)
    assert half.counts_of(counts) == [row[4:] for row in counts]
