"""The heat file, the sizes of a file's tensors, and the flags that lead to a placement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeserve.cli.command_line import read_options, resolve
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.placement.heat import ExpertHeat, read_heat, write_heat
from moeserve.placement.options import placement_options
from moeserve.placement.sizes import ModelSizes

GOOD: dict[str, Any] = {
    "format": "moeserve-expert-heat",
    "version": 1,
    "model": "m",
    "layers": 2,
    "experts": 3,
    "experts_per_token": 1,
    "counts": [[1, 2, 3], [4, 5, 6]],
}


def read(tmp_path: Path, text: str | bytes) -> ExpertHeat:
    path = tmp_path / "heat.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_heat(path, 2, 3)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(max_size=50),
    counts=st.lists(st.lists(st.integers(0, 1 << 53), min_size=3, max_size=3), min_size=2, max_size=2),
)
def test_what_is_written_is_read(tmp_path: Path, name: str, counts: list[list[int]]) -> None:
    name = name.encode("utf-8", "replace").decode()
    heat = ExpertHeat(name, 2, 3, 1, counts)
    assert read(tmp_path, write_heat(heat)) == heat
    assert json.loads(write_heat(heat)) == GOOD | {"model": name, "counts": counts}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "format"),
        ({"version": 2}, "version"),
        ({"version": None}, "version"),
        ({"format": None}, "format"),
        ({"layers": 3}, "`counts` has 2 layers, `layers` says 3"),
        ({"experts": 4}, "`counts` has 3 experts in layer 0"),
        (
            {"counts": [[1, 2], [3, 4]], "experts": 2},
            "model of 2 layers with 2 experts each .* this model has 2 layers with 3; export",
        ),
        ({"counts": [[1, 2, -1], [4, 5, 6]]}, r"counts"),
        ({"counts": [[1, 2, 1 << 60], [4, 5, 6]]}, r"counts"),
        ({"counts": [[1, 2, 1.5], [4, 5, 6]]}, r"counts"),
        ({"counts": [[1, 2, "3"], [4, 5, 6]]}, r"counts"),
        ({"counts": [[1, 2, True], [4, 5, 6]]}, r"counts"),
        ({"extra": 1}, "extra"),
        ({"model": "x" * 2000}, "model"),
    ],
)
def test_a_file_that_is_not_the_heat_of_this_model(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    changed = {name: value for name, value in (GOOD | change).items() if value is not None}
    with pytest.raises(ConfigError, match=rf"--expert-heat .*heat.json: .*{said}"):
        read(tmp_path, json.dumps(changed))


@pytest.mark.parametrize("text", ["", "{", "[]", "nul", b"\xff\xfe", "[" * 100_000, '{"counts": NaN}'])
def test_a_file_that_is_no_json(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(ConfigError, match="--expert-heat"):
        read(tmp_path, text)


def test_sizes_of_a_file(tiny_model: Path) -> None:
    gguf = open_gguf(tiny_model)
    config = read_shape(gguf)
    sizes = ModelSizes.of(gguf.tensors, KvLayout(config))
    layers = sum(layer.dense.cpu + config.num_experts * layer.expert.cpu for layer in sizes.layers)
    assert layers + sizes.embedding.cpu + sizes.head.cpu == sum(t.nbytes for t in gguf.tensors.values())
    assert sizes.layers[0].kv == 2 * sum(config.heads.kv_widths) * config.heads.num_kv_heads


def test_flags_become_wishes(tiny_model: Path, tmp_path: Path) -> None:
    model = read_shape(open_gguf(tiny_model))
    heat = ExpertHeat(
        "m", model.num_layers, model.num_experts, 2, [[7] * model.num_experts] * model.num_layers
    )
    (tmp_path / "heat.json").write_bytes(write_heat(heat))
    (tmp_path / "rules.yaml").write_text("- {match: experts, device: cpu}")
    given_flags: dict[str, Any] = {
        "num_gpu_experts": "3",
        "gpu_memory_budget": "1.5",
        "n_gpu_layers": "2",
        "expert_heat": str(tmp_path / "heat.json"),
        "placement_rules": str(tmp_path / "rules.yaml"),
        "max_num_seqs": "4",
        "max_model_len": "100",
    }
    options = placement_options(resolve(read_options(given_flags, {})), model)
    assert (options.num_gpu_experts, options.n_gpu_layers) == (3, 2)
    assert options.gpu_memory_budget == 3 << 29
    assert options.counts == heat.counts
    assert (options.most_kv_tokens, options.least_kv_tokens) == (400, 100)
    assert options.given_flags() == [
        "--num-gpu-experts",
        "--gpu-memory-budget",
        "--n-gpu-layers",
        "--expert-heat",
        "--placement-rules",
    ]
