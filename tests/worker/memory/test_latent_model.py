"""A model of latent attention behind the Runner: its cache, what it answers in a crowd, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from moeserve.kernels.routing.options import RouterOptions
from moeserve.kv.cache import KvCache
from moeserve.kv.cache_pages import CachePages, Move, kv_tensors
from moeserve.kv.host_blocks import HostPage
from moeserve.kv.layout import KvLayout
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import NewSeq, Row
from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder, open_model
from moeserve.models.registry import read_checked_shape, read_shape
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.runner import Runner
from tests.gpu.driver import GREEDY, SCORED, Driver, small_config
from tests.support.models.hugging_face_model import write_family


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent") / "tiny"
    write_family(folder, "deepseek_v3")
    return folder


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    return load_cpu_runner(small_config(folder, threads=2), lambda *_: None)


TOKENS = [(37 * i * i + 11 * i) % 4000 for i in range(90)]


@pytest.fixture(scope="module")
def alone(runner: Runner) -> list[TokenLogprob]:
    return Driver(runner).score(0, TOKENS, len(TOKENS))


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_chunks_do_not_change_a_bit(runner: Runner, alone: list[TokenLogprob], chunk: int) -> None:
    assert Driver(runner).score(3, TOKENS, chunk) == alone


def test_a_crowd_does_not_change_a_bit(runner: Runner, alone: list[TokenLogprob]) -> None:
    driver = Driver(runner)
    crowd = [list(reversed(TOKENS))[10 * i :] for i in range(1, 6)]
    new = [driver.new(0, TOKENS, SCORED), *(driver.new(i, c, GREEDY) for i, c in enumerate(crowd, 1))]
    rows = [driver.row(0, len(TOKENS), sample=True)]
    rows += [driver.row(i, len(c), sample=True) for i, c in enumerate(crowd, 1)]
    result = driver.step(new, rows)
    last = result.sampled[0].logprob
    assert last is not None
    assert [*result.prompt_logprobs[0], last] == alone


def test_what_another_request_has_cached_is_read(runner: Runner, alone: list[TokenLogprob]) -> None:
    """As the router does for a shared prefix, and for a preempted request that comes back."""
    driver, shared = Driver(runner), 41
    driver.score(0, TOKENS, len(TOKENS))
    prefix = np.array(driver.slots(0)[:shared], np.int32).tobytes()
    count = len(TOKENS) - shared
    whole = np.array(TOKENS, np.int32).tobytes()
    new = NewSeq(5, whole, len(TOKENS), prefix, SCORED, state_slot=-1)
    slots = np.array([driver.take() for _ in range(count)], np.int32).tobytes()
    result = driver.step([new], [Row(5, shared, count, slots, True)])
    last = result.sampled[0].logprob
    assert last is not None
    assert [*result.prompt_logprobs[0], last] == alone[shared:]


def test_one_vector_a_token_is_cached(folder: Path) -> None:
    shape = read_checked_shape(open_folder(folder))
    layout, latent = KvLayout(shape), shape.latent
    assert latent is not None
    assert layout.layer_bytes(0) == 2 * (latent.rank + latent.rotary_dim)
    (layer,) = KvCache(layout, 10, range(1), zeroed=True).layers
    assert layer.keys.nbytes == 10 * layout.layer_bytes(0)
    assert layer.values.shape == (10, 1, latent.rank)
    assert layer.values.data_ptr() == layer.keys.data_ptr()


def test_a_page_on_disk_has_the_vectors_once(folder: Path) -> None:
    layout = KvLayout(read_checked_shape(open_folder(folder)))
    layers = KvCache(layout, 10, range(2), zeroed=True).layers
    for layer in layers:
        layer.keys.normal_()
    before, slots = [layer.keys.clone() for layer in layers], np.array([1, 3, 4, 8], np.int32)
    pages = CachePages(kv_tensors(layers), len(slots))
    assert pages.page_bytes == len(slots) * layout.token_bytes(range(2))
    page = HostPage([torch.zeros(pages.page_bytes, dtype=torch.uint8)], [0])
    pages.out([Move(slots, page)])()
    for layer in layers:
        layer.keys[torch.from_numpy(slots).long()] = 0
    pages.into([Move(slots, page)], pages.mark())
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(layers, before, strict=True))


def refused(folder: Path, tmp_path: Path, **changes: Any) -> str:
    """What is said of the folder with another config."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError) as caught:
        read_checked_shape(open_folder(copy))
    return str(caught.value)


YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "relu"}, "'scoring_func' is 'relu'"),
        (
            {"topk_method": "greedy"},
            "'topk_method' is 'greedy'; only noaux_tc are supported with sigmoid scores",
        ),
        ({"rope_interleave": False}, "'rope_interleave' is False"),
        ({"moe_layer_freq": 2}, "'moe_layer_freq' is 2"),
        ({"rope_parameters": YARN}, "'mscale' is None and 'mscale_all_dim' None"),
        (
            {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
            "two equal numbers are supported",
        ),
        (
            {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 2.0}},
            "'attention_factor' beside 'mscale'",
        ),
        (
            {"mlp_layer_types": ["dense", "sparse", "dense"]},
            "'mlp_layer_types' is ['dense', 'sparse', 'dense']",
        ),
        ({"num_attention_heads": 8}, "rows, but config.json's heads need 8 x ("),
        ({"qk_nope_head_dim": None}, "'qk_nope_head_dim' or 'qk_rope_head_dim' is missing"),
        ({"model_type": "deepseek_v32"}, "'index_n_heads' is missing"),
    ],
)
def test_folders_that_would_be_computed_wrongly(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    assert message in refused(folder, tmp_path, **changes)


def write_header(path: Path, tensors: dict[str, tuple[int, ...]], **changes: float) -> None:
    """A GGUF of the architecture's metadata, and zeros of these shapes."""
    values: dict[str, float] = {
        "block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 96,
        "attention.value_length": 64, "attention.key_length_mla": 64, "attention.value_length_mla": 32,
        "attention.kv_lora_rank": 64, "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": 32,
        "rope.freq_base": 1e4, "leading_dense_block_count": 1,
    }  # fmt: skip
    writer = gguf.GGUFWriter(str(path), "deepseek2")
    for key, value in (values | changes).items():
        if isinstance(value, int):
            writer.add_uint32(f"deepseek2.{key}", value)
        else:
            writer.add_float32(f"deepseek2.{key}", value)
    writer.add_token_list(["a", "b"])
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        ({"blk.0.attn_kv_b.weight": (128, 64)}, {}, "tensor 'blk.0.attn_kv_b.weight' is of a file that was converted"),
        ({}, {"attention.head_count_kv": 2}, "head_count_kv' is 2; 1 to 1"),
        ({}, {"attention.key_length": 80}, "key_length' is 80; 96 to 96"),
        ({}, {"attention.key_length_mla": 32}, "key_length_mla' is 32; 33 to"),
        ({}, {"expert_gating_func": 3, "leading_dense_block_count": 0, "expert_count": 4, "expert_used_count": 2,
              "expert_feed_forward_length": 32}, "expert_gating_func' is 3"),
        ({"blk.0.indexer.k_norm.weight": (64,)}, {}, "tensor 'token_embd.weight' is missing"),
    ],
)  # fmt: skip
def test_files_that_would_be_computed_wrongly(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]], changes: dict[str, float], message: str
) -> None:
    path = tmp_path / "odd.gguf"
    write_header(path, tensors or {"output_norm.weight": (64,)}, **changes)
    with pytest.raises(ModelError) as caught:
        read_checked_shape(open_model(path))
    assert message in str(caught.value)


def test_version_twos_router_is_read(tmp_path: Path) -> None:
    """Its files may say nothing of scores, and have no bias that chooses."""
    path = tmp_path / "v2.gguf"
    groups = {"expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 16.0}
    experts = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    write_header(path, {"output_norm.weight": (64,)}, leading_dense_block_count=0, **experts, **groups)
    shape = read_shape(open_model(path))
    moe = shape.layers[0].moe
    assert moe is not None
    assert not moe.choice_bias
    router = RouterOptions("softmax", normalize=False, scale=16.0, groups=4, top_groups=2, group_best=1)
    assert moe.router == router
