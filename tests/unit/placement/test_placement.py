"""Where everything goes: budgets are kept, the hottest experts come first, what cannot be is an error that says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.config.units import MIB
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.placement import ModelSizes, Placement, PlacementOptions, place
from tests.support.router.placement_world import gpu, gpu_bytes, model

EVERYTHING = 4096  # MiB: more than any model here takes


def counts(layers: int, experts: int) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(st.integers(0, 20), min_size=experts, max_size=experts)
    return st.lists(row, min_size=layers, max_size=layers)


def experts_of(placement: Placement) -> list[int]:
    return [len(layer.gpu_experts) for layer in placement.layers]


# ---------------------------------------------------------------- properties


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_budget_is_never_exceeded_and_the_hottest_are_on_the_gpu(data: st.DataObject) -> None:
    layers, experts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    sizes = model(layers, experts, without_experts=data.draw(st.integers(0, layers)))
    heat = data.draw(counts(layers, experts))
    budget = data.draw(st.integers(1, 400)) * MIB
    options = PlacementOptions(
        gpu_memory_budget=budget,
        counts=heat,
        n_gpu_layers=data.draw(st.none() | st.integers(1, layers)),
        most_kv_tokens=data.draw(st.integers(64, 4096)),
    )
    machine = gpu(EVERYTHING)
    try:
        placement = place(sizes, options, machine)
    except ConfigError:
        return  # not even the dense parts fit, or the buffers
    assert gpu_bytes(sizes, placement, machine.reserved_bytes) <= budget
    assert 64 <= (placement.kv_tokens or 0) <= options.most_kv_tokens
    dense = [layer.dense for layer in placement.layers]
    assert dense == sorted(dense)  # the CPU's layers first
    assert "cpu" not in dense or placement.embedding == "cpu"
    if options.n_gpu_layers is not None:
        assert dense.count("cuda") == options.n_gpu_layers
    on_gpu = [(i, e) for i, layer in enumerate(placement.layers) for e in layer.gpu_experts]
    in_ram = [
        (i, e)
        for i, layer in enumerate(placement.layers)
        if layer.dense == "cuda"
        for e in placement.cpu_experts(i)
    ]
    if on_gpu and in_ram:
        assert min(heat[i][e] for i, e in on_gpu) >= max(heat[i][e] for i, e in in_ram)


@settings(max_examples=50, deadline=None)
@given(small=st.integers(80, 300), more=st.integers(0, 200))
def test_more_memory_never_means_fewer_experts(small: int, more: int) -> None:
    sizes = model()
    few, many = (
        place(sizes, PlacementOptions(gpu_memory_budget=mib * MIB, most_kv_tokens=1000), gpu(EVERYTHING))
        for mib in (small, small + more)
    )
    if few.layers[0].prefill != many.layers[0].prefill:
        return  # the larger budget has bought the buffers for streaming
    for a, b in zip(few.layers, many.layers, strict=True):
        assert set(a.gpu_experts) <= set(b.gpu_experts)


@settings(max_examples=50, deadline=None)
@given(count=st.integers(0, 8), heat=st.none() | counts(4, 8))
def test_so_many_of_each_layer(count: int, heat: list[list[int]] | None) -> None:
    placement = place(model(), PlacementOptions(num_gpu_experts=count, counts=heat), gpu(EVERYTHING))
    assert experts_of(placement) == [count] * 4
    if heat is None:
        assert all(layer.gpu_experts == tuple(range(count)) for layer in placement.layers)
        return
    for index, layer in enumerate(placement.layers):
        chosen = sorted(heat[index][e] for e in layer.gpu_experts)
        assert chosen == sorted(heat[index])[8 - count :]


# ---------------------------------------------------------------- by example


def test_without_options_all_is_on_a_large_gpu() -> None:
    sizes = model()
    placement = place(sizes, PlacementOptions(most_kv_tokens=500), gpu(EVERYTHING))
    assert experts_of(placement) == [8] * 4
    assert not placement.shares_layers
    assert (placement.cpu_weight_bytes, placement.stream_bytes, placement.kv_tokens) == (0, 0, 500)


def test_without_heat_all_layers_get_alike() -> None:
    placement = place(model(), PlacementOptions(gpu_memory_budget=150 * MIB), gpu(EVERYTHING))
    assert max(experts_of(placement)) - min(experts_of(placement)) <= 1
    assert 0 < placement.num_gpu_experts < 32


def test_what_leaves_ram_is_what_the_experts_took_there() -> None:
    sizes = model()
    none, half = (place(sizes, PlacementOptions(num_gpu_experts=n), gpu(EVERYTHING)) for n in (0, 4))
    moved = sum(4 * layer.expert.cpu for layer in sizes.layers)
    assert none.cpu_weight_bytes - half.cpu_weight_bytes == moved


def test_the_last_layers_are_on_the_gpu_and_the_embedding_with_the_first() -> None:
    placement = place(model(), PlacementOptions(n_gpu_layers=1, num_gpu_experts=2), gpu(EVERYTHING))
    assert [layer.dense for layer in placement.layers] == ["cpu", "cpu", "cpu", "cuda"]
    assert experts_of(placement) == [0, 0, 0, 2]
    assert (placement.embedding, placement.head) == ("cpu", "cuda")


def test_a_quarter_is_kept_for_kv_while_experts_want_it_all() -> None:
    sizes = model(experts=64)
    placement = place(sizes, PlacementOptions(gpu_memory_budget=500 * MIB), gpu(EVERYTHING))
    dense = 16 + 9 + 9 + 4 * 11  # MiB, with what is reserved
    kv = (placement.kv_tokens or 0) * sizes.kv_bytes()
    assert kv / ((500 - dense) * MIB) == pytest.approx(0.25, abs=0.01)
    assert 0 < placement.num_gpu_experts < 4 * 64


def test_streaming_gives_way_where_there_is_no_room() -> None:
    placement = place(
        model(), PlacementOptions(num_gpu_experts=0, gpu_memory_budget=80 * MIB), gpu(EVERYTHING)
    )
    assert {layer.prefill for layer in placement.layers} == {"cpu"}
    assert placement.stream_bytes == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (PlacementOptions(num_gpu_experts=9), "more than the 8 experts of a layer"),
        (PlacementOptions(n_gpu_layers=5), "more than the model's 4 layers"),
        (PlacementOptions(gpu_memory_budget=5000 * MIB), "4.00 GiB of GPU memory are free"),
        (PlacementOptions(num_gpu_experts=8, gpu_memory_budget=150 * MIB), r"--num-gpu-experts 6 would fit"),
        (PlacementOptions(n_gpu_layers=0), "use --device cpu"),
        (PlacementOptions(n_gpu_layers=4, gpu_memory_budget=60 * MIB), "--n-gpu-layers 3 would fit"),
        (PlacementOptions(num_gpu_experts=1, gpu_memory_budget=60 * MIB), "--n-gpu-layers 3 would fit"),
        (PlacementOptions(gpu_memory_budget=35 * MIB), "use the CPU engine, or a smaller model"),
        (PlacementOptions(gpu_memory_budget=100 * MIB, max_total_tokens=1 << 20), "for the least KV"),
    ],
)
def test_what_cannot_be_says_what_could(options: PlacementOptions, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place(model(), options, gpu(EVERYTHING))


def test_a_block_that_drafts_reads_the_embedding_on_the_gpu() -> None:
    """Where the embedding is in RAM, the block has another copy; so the embedding alone is not moved to RAM."""
    sizes = model()
    drafting = replace(sizes, block_embedding=sizes.embedding)
    some = PlacementOptions(n_gpu_layers=3)
    in_ram, copied = (place(one, some, gpu(EVERYTHING)) for one in (sizes, drafting))
    assert copied.gpu_weight_bytes == in_ram.gpu_weight_bytes + sizes.embedding.cuda
    tight = PlacementOptions(gpu_memory_budget=75 * MIB)
    places = [place(one, tight, gpu(EVERYTHING)) for one in (sizes, drafting)]
    assert [(one.embedding, one.layers_in_ram) for one in places] == [("cpu", 0), ("cpu", 1)]


def test_only_layers_on_the_gpu_record_drafts_there() -> None:
    """The first two layers are recurrent: with one of them in RAM, the GPU needs half of the memory."""
    plain = model()
    layers = [replace(layer, state=MIB * (index < 2)) for index, layer in enumerate(plain.layers)]
    sizes = replace(plain, layers=tuple(layers)).with_draft_records(8 * MIB)
    assert [layer.records // MIB for layer in sizes.layers] == [8, 8, 0, 0]
    machine = replace(gpu(EVERYTHING), can_stream=False)
    for on_gpu, records in ((4, 16), (3, 8), (2, 0)):
        options = PlacementOptions(n_gpu_layers=on_gpu, num_gpu_experts=0, max_total_tokens=64)
        taken = gpu_bytes(sizes, place(sizes, options, machine), 16 * MIB)
        place(sizes, replace(options, gpu_memory_budget=taken + records * MIB), machine)
        with pytest.raises(ConfigError, match="do not suffice"):
            place(sizes, replace(options, gpu_memory_budget=taken + records * MIB - 1), machine)


def test_what_would_fit_does_fit() -> None:
    place(model(), PlacementOptions(num_gpu_experts=6, gpu_memory_budget=150 * MIB), gpu(EVERYTHING))
    place(
        model(),
        PlacementOptions(n_gpu_layers=3, num_gpu_experts=0, gpu_memory_budget=60 * MIB),
        gpu(EVERYTHING),
    )


# ---------------------------------------------------------------- where the dense parts do not fit

# With 16 MiB for the engine: the head takes 9 MiB, a layer's dense part 11, the embedding 9.
ALL_DENSE = 16 + 9 + 9 + 4 * 11


@pytest.mark.parametrize(
    ("mib", "embedding", "layers_in_ram"),
    [
        (ALL_DENSE + 1, "cuda", 0),
        (ALL_DENSE - 1, "cpu", 0),
        (ALL_DENSE - 9, "cpu", 1),
        (ALL_DENSE - 9 - 11 + 1, "cpu", 1),
        (ALL_DENSE - 9 - 11 - 1, "cpu", 2),
        (16 + 9 + 11 + 1, "cpu", 3),
    ],
)
def test_what_does_not_fit_is_computed_by_the_cpu(mib: int, embedding: str, layers_in_ram: int) -> None:
    """The embedding goes first, then the first layers; none of them while an expert could leave instead."""
    placement = place(model(), PlacementOptions(gpu_memory_budget=mib * MIB), gpu(EVERYTHING))
    assert (placement.embedding, placement.layers_in_ram, placement.head) == (
        embedding,
        layers_in_ram,
        "cuda",
    )
    assert placement.num_gpu_experts <= 4  # what a layer that has left makes room for
    assert [layer.dense for layer in placement.layers] == ["cpu"] * layers_in_ram + ["cuda"] * (
        4 - layers_in_ram
    )


def test_layers_leave_rather_than_the_kv() -> None:
    budget = (ALL_DENSE + 4) * MIB  # 1,024 tokens in 4 layers
    for ample, embedding, layers_in_ram in (
        (1024, "cuda", 0),
        (3000, "cpu", 0),
        (8000, "cpu", 1),
        (100_000, "cpu", 3),  # one stays
    ):
        options = PlacementOptions(gpu_memory_budget=budget, num_gpu_experts=0, ample_kv_tokens=ample)
        placement = place(model(), options, gpu(EVERYTHING))
        assert (placement.embedding, placement.layers_in_ram) == (embedding, layers_in_ram)
        assert (placement.kv_tokens or 0) >= min(ample, 40_000)


def sharing() -> ModelSizes:
    """Layers 1 and 2 use the choice of layer 0, layer 4 that of layer 3."""
    sizes = model(5)
    layers = [replace(layer, needs_layer_before=at in (1, 2, 4)) for at, layer in enumerate(sizes.layers)]
    return replace(sizes, layers=tuple(layers))


@pytest.mark.parametrize(("on_gpu", "other"), [(1, 2), (3, 5), (4, 5)])
def test_layers_that_share_a_choice_of_keys_are_on_one_device(on_gpu: int, other: int) -> None:
    with pytest.raises(ConfigError, match=f"so both layers must be on the GPU or both in RAM: .* {other}$"):
        place(sharing(), PlacementOptions(n_gpu_layers=on_gpu), gpu(EVERYTHING))
    assert place(sharing(), PlacementOptions(n_gpu_layers=other), gpu(EVERYTHING)).layers_in_ram == 5 - other
    moved = {
        place(
            sharing(), PlacementOptions(gpu_memory_budget=budget * MIB, ample_kv_tokens=1000), gpu(EVERYTHING)
        ).layers_in_ram
        for budget in range(64, 128, 4)
    }
    assert moved == {0, 3}


def test_layers_with_inputs_of_their_own_are_where_the_embedding_is() -> None:
    sizes = model(3)
    sizes = replace(sizes, layers=tuple(replace(layer, needs_layer_before=True) for layer in sizes.layers))
    with pytest.raises(ConfigError, match=r"use --n-gpu-layers 3, or --device cpu$"):
        place(sizes, PlacementOptions(n_gpu_layers=2), gpu(EVERYTHING))
    assert place(sizes, PlacementOptions(n_gpu_layers=3), gpu(EVERYTHING)).embedding == "cuda"
    options = PlacementOptions(
        gpu_memory_budget=(ALL_DENSE + 4) * MIB, num_gpu_experts=0, ample_kv_tokens=100_000
    )
    assert place(model(3), options, gpu(EVERYTHING)).embedding == "cpu"
    placement = place(sizes, options, gpu(EVERYTHING))
    assert (placement.layers_in_ram, placement.embedding) == (0, "cuda")


def test_the_layers_that_the_user_wants_on_the_gpu_stay() -> None:
    options = PlacementOptions(
        gpu_memory_budget=(ALL_DENSE + 1) * MIB, n_gpu_layers=4, ample_kv_tokens=100_000
    )
    placement = place(model(), options, gpu(EVERYTHING))
    assert (placement.layers_in_ram, placement.embedding) == (0, "cuda")


@pytest.mark.parametrize(
    "options",
    [
        PlacementOptions(num_gpu_experts=0),
        PlacementOptions(gpu_memory_budget=1),
        PlacementOptions(n_gpu_layers=1),
        PlacementOptions(counts=[[1]]),
    ],
)
def test_without_a_gpu_these_flags_are_errors(options: PlacementOptions) -> None:
    (flag,) = options.given_flags()
    with pytest.raises(ConfigError, match=f"{flag}: there is nothing to place"):
        place(model(), options, None)


def test_the_cpu_engine_has_everything_in_ram(tiny_model: Path) -> None:
    gguf = open_gguf(tiny_model)
    config = read_shape(gguf)
    placement = place(ModelSizes.of(gguf.tensors, KvLayout(config)), PlacementOptions(), None)
    assert not placement.uses_gpu
    assert placement.cpu_weight_bytes == sum(tensor.nbytes for tensor in gguf.tensors.values())
    assert placement.kv_tokens is None


def test_layers_without_experts_leave_nothing_in_ram() -> None:
    sizes = model(4, 8, without_experts=2)
    placement = place(sizes, PlacementOptions(num_gpu_experts=3), gpu(EVERYTHING))
    assert experts_of(placement) == [0, 0, 3, 3]
    assert [layer.num_cpu_experts for layer in placement.layers] == [0, 0, 5, 5]
    assert [placement.cpu_experts(index) for index in (1, 2)] == [(), (3, 4, 5, 6, 7)]
    dense = place(model(3, without_experts=3), PlacementOptions(), gpu(EVERYTHING))
    assert (dense.num_experts, dense.shares_layers, dense.cpu_weight_bytes) == (0, False, 0)
    with pytest.raises(ConfigError, match="4 is more than the 0 experts of a layer"):
        place(model(3, without_experts=3), PlacementOptions(num_gpu_experts=4), gpu(EVERYTHING))
