"""Vision towers of folders in Hugging Face's layout: embeddings beside transformers' and beside those of the same
tower's mmproj file; and folders that have none, or another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.cli.command_line import find_tower
from moeserve.errors import ConfigError
from moeserve.models.errors import ModelError
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.towers.load import make_tower
from tests.support.pictures.deepstack_model import DEEP, write_model, write_tower
from tests.support.pictures.gemma_tower_file import OUTPUT, TruthTower
from tests.support.pictures.picture_fixture import errors

PIXELS = np.random.default_rng(1).integers(0, 256, (24, 60, 3), dtype=np.uint8)


def embeddings(path: Path) -> np.ndarray:
    return make_tower(*open_tower(path)).encode(PIXELS[:, :56] if "qwen" in str(path) else PIXELS)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-VL-MoE with DeepStack; its mmproj file lies beside the folder."""
    folder = tmp_path_factory.mktemp("qwen") / "tiny"
    model = write_model(folder, has_experts=True)
    write_tower(model, folder.with_name("mmproj.gguf"))
    return folder


def test_qwen(qwen: Path) -> None:
    """The same numbers as from the file, which other tests compare with transformers."""
    _, shape = open_tower(qwen)
    assert shape == open_tower(qwen.with_name("mmproj.gguf"))[1]
    assert getattr(shape, "deep", ()) == tuple(DEEP)
    # The file has float32, the folder what transformers saved.
    found, truth = embeddings(qwen), embeddings(qwen.with_name("mmproj.gguf"))
    assert found.shape == truth.shape
    assert errors(found, truth).max() < 1e-5
    assert find_tower("auto", qwen) == find_tower(str(qwen), qwen) == str(qwen)


@pytest.mark.parametrize(("model_type", "prefix"), [("qwen3_5_moe", "Qwen3_5Moe"), ("qwen4_exp", "Qwen4Exp")])
def test_qwen35(model_type: str, prefix: str, tmp_path: Path) -> None:
    """Without DeepStack, as Qwen3.5, 3.6 and 3.8 are published, in BF16 and with their processor's file."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{prefix}VisionConfig")(
        depth=2, hidden_size=32, num_heads=2, intermediate_size=48, patch_size=4, spatial_merge_size=2,
        out_hidden_size=64, num_position_embeddings=36, initializer_range=0.15,
    )  # fmt: skip
    model: torch.nn.Module = getattr(transformers, f"{prefix}VisionModel")(config)
    model.bfloat16().float().eval()
    save_file(
        {f"model.visual.{name}": each.bfloat16() for name, each in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    vision = config.to_dict() | {"model_type": model_type, "deepstack_visual_indexes": []}
    write_json(tmp_path / "config.json", {"model_type": model_type, "vision_config": vision})
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 4, "merge_size": 2}
    write_json(tmp_path / "preprocessor_config.json", processor)
    tower = make_tower(*open_tower(tmp_path))
    rows, columns = 6, 14
    pixels = PIXELS[:, :56]
    split = torch.from_numpy(pixels.copy()).view(rows // 2, 2, 4, columns // 2, 2, 4, 3)
    patches = split.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, 16).float() / 127.5 - 1
    with torch.no_grad():
        found = model(
            patches.expand(-1, -1, 2, -1).reshape(rows * columns, -1),
            grid_thw=torch.tensor([[1, rows, columns]]),
        )
    assert errors(tower.encode(pixels), found.pooler_output.numpy()).max() < 1e-4


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def write_gemma(folder: Path, *, standardized: bool, clamped: bool) -> TruthTower:
    truth = TruthTower(standardized=standardized, clamped=clamped)
    tensors = {f"model.vision_tower.{name}": each for name, each in truth.tower.state_dict().items()}
    embedder = truth.embedder.state_dict()
    tensors |= {f"model.embed_vision.{name}": each for name, each in embedder.items()}
    tensors |= {"model.embed_audio.embedding_projection.weight": torch.ones(2, 2)}
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    config = {"vision_config": truth.tower.config.to_dict(), "text_config": {"hidden_size": OUTPUT}}
    write_json(folder / "config.json", config)
    processor = {"do_normalize": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    write_json(folder / "processor_config.json", {"image_processor": processor})
    return truth


@pytest.mark.parametrize("standardized", [False, True])
@pytest.mark.parametrize("clamped", [False, True])
def test_gemma(tmp_path: Path, *, standardized: bool, clamped: bool) -> None:
    """26B-A4B's and 31B's tower standardises tokens, E2B's and E4B's clamps; the sound's tensors are left out."""
    truth = write_gemma(tmp_path, standardized=standardized, clamped=clamped)
    tower = make_tower(*open_tower(tmp_path))
    found, expected = tower.encode(PIXELS), truth.encode(PIXELS)
    assert found.shape == expected.shape == (10, OUTPUT)
    assert errors(found, expected).max() < 1e-5


def test_folders_without_a_tower(qwen: Path, tmp_path: Path) -> None:
    config = json.loads((qwen / "config.json").read_text())
    weights = {k: v for file in qwen.glob("*.safetensors") for k, v in load_file(file).items()}
    for name, change, words in (
        ("none", lambda c, _: c.pop("vision_config"), "has no 'vision_config': this model has no vision tower"),
        ("other", lambda c, _: c["vision_config"].update(model_type="pixtral"), "its vision tower is a 'pixtral'"),
        ("act", lambda c, _: c["vision_config"].update(hidden_act="relu"), "vision_config.hidden_act is 'relu'"),
        ("deep", lambda c, _: c["vision_config"].update(depth=0), "vision_config.depth"),
        ("lost", lambda _, w: w.pop("model.visual.merger.norm.bias"), "v.post_ln.bias is missing"),
        ("more", lambda _, w: w.update({"model.visual.gate.weight": torch.ones(2)}), "'model.visual.gate.weight'"),
    ):  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        changed, tensors = json.loads(json.dumps(config)), dict(weights)
        change(changed, tensors)
        write_json(folder / "config.json", changed)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ModelError, match=words):
            open_tower(folder)
    with pytest.raises(ConfigError, match="none has no vision tower"):
        find_tower("auto", tmp_path / "none")
    write_json(tmp_path / "act" / "config.json", config)
    write_json(tmp_path / "act" / "preprocessor_config.json", {"image_mean": [0.48] * 3})
    with pytest.raises(ModelError, match=r"image_mean is not 0\.5 for each channel"):
        open_tower(tmp_path / "act")
