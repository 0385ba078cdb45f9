"""Which model a request to load or unload an adapter is for, by what the request and the adapter's files say."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moeserve.config import ServerConfig
from moeserve.front.adapters import LOAD, UNLOAD, LoadedAdapters, adapters_file
from moeserve.front.config import ServedModel
from moeserve.front.memory import Memory
from moeserve.front.pool import ModelPool
from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.adapters import SavedAdapter
from tests.support.front.scripted_models import Script, ScriptedModels

FILES = {"Qwen3-30B-A3B-Q4_K_M.gguf": "qwen,fast", "gpt-oss-20b-mxfp4.gguf": "oss", "gpt-oss-120b": "large"}


@pytest.fixture
def adapters(tmp_path: Path) -> LoadedAdapters:
    (tmp_path / "loras").mkdir()
    models = [
        ServedModel(
            ServerConfig(model=f"/m/{file}", served_model_name=names, lora_dir=str(tmp_path / "loras"))
        )
        for file, names in FILES.items()
    ]
    world = ScriptedModels({model.name: Script() for model in models}, 1)
    pool = ModelPool(models, world, Memory(1), load_timeout=1.0, idle_limit=None, max_waiting=1)
    saved = [SavedAdapter("sql", "/x", "key", True), SavedAdapter("gone", "/y", "key", False)]
    adapters_file(tmp_path, pool.find("oss")).write_bytes(msgspec.json.encode(saved))
    return LoadedAdapters(pool, tmp_path)


def target(adapters: LoadedAdapters, path: str, query: str | None = None, **body: Any) -> str:
    return asyncio.run(adapters.model_for(path, query, json.dumps(body).encode())).name


@pytest.mark.parametrize(
    ("base", "model"),
    [
        ("Qwen/Qwen3-30B-A3B", "qwen"),
        ("/home/me/models/qwen3_30b_a3b/", "qwen"),
        ("openai/gpt-oss-120b", "large"),
        ("oss", "oss"),
        ("openai/gpt-oss", None),  # both
        ("Qwen/Qwen3-30B", None),  # the begin of a name, but of another model
        ("Qwen/Qwen3-3", None),
        (None, None),
    ],
)
def test_the_files_of_an_adapter_name_its_model(
    adapters: LoadedAdapters, tmp_path: Path, base: str | None, model: str | None
) -> None:
    (tmp_path / "loras" / "a").mkdir()
    config = tmp_path / "loras" / "a" / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": base}))
    if model is not None:
        assert target(adapters, LOAD, lora_name="new", lora_path="a") == model
        return
    with pytest.raises(ApiError, match="give one of 'qwen', 'oss', 'large'"):
        target(adapters, LOAD, lora_name="new", lora_path="a")
    assert target(adapters, LOAD, lora_name="new", lora_path="a", base_model_name="fast") == "qwen"
    assert target(adapters, LOAD, "large", lora_name="new", lora_path="a") == "large"


def test_a_loaded_adapter_is_at_its_model(adapters: LoadedAdapters) -> None:
    assert target(adapters, LOAD, lora_name="sql", lora_path="no matter") == "oss", (
        "replaced or refused there"
    )
    assert target(adapters, UNLOAD, lora_name="sql") == "oss"
    with pytest.raises(ApiError, match="is a name of 'oss'"):
        target(adapters, LOAD, "qwen", lora_name="sql", lora_path="a")
    for unknown in ("gone", "none"):
        with pytest.raises(ApiError, match="cannot be found"):
            target(adapters, UNLOAD, lora_name=unknown)


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"lora_name": 5}', b'{"lora_path": "a"}', b"{" * 100000])
def test_a_bad_body_is_an_error_of_the_client(adapters: LoadedAdapters, body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        asyncio.run(adapters.model_for(LOAD, None, body))
    assert refused.value.status == 400


def test_a_configuration_behind_a_link_is_not_read(adapters: LoadedAdapters, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"base_model_name_or_path": "a secret"}')
    (tmp_path / "loras" / "a").mkdir()
    (tmp_path / "loras" / "a" / "adapter_config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ApiError) as refused:
        target(adapters, LOAD, lora_name="new", lora_path="a")
    assert "secret" not in refused.value.message
