"""LoRA adapters that clients load behind a front: each goes to its base model, and is there again after a swap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models.hugging_face_model import read_model, write_model
from tests.support.models.peft_adapters import ATTENTION, write_adapter
from tests.support.servers.server import running_server

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.mark.slow  # four loads
def test_an_adapter_goes_to_its_base_model_and_survives_a_swap(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        write_model(tmp_path / name, seed=seed)
    base = read_model(tmp_path / "two")
    for name in ("tuned", "nameless"):
        write_adapter(tmp_path / "loras" / name, base, 3, r=4, lora_alpha=8, target_modules=ATTENTION)
    _name_base(tmp_path / "loras" / "tuned", "somewhere/Two")
    _name_base(tmp_path / "loras" / "nameless", None)
    entries = [{"model": str(tmp_path / name), "max-total-tokens": 1024} for name in ("one", "two")]
    (tmp_path / "models.json").write_text(json.dumps(entries))
    flags = ["--lora-dir", str(tmp_path / "loras"), "--lora-memory", "0.1", "--models-memory", "0.8"]
    with (
        running_server(None, "--models-file", str(tmp_path / "models.json"), *flags) as server,
        httpx.Client(base_url=server.base_url, timeout=120.0) as client,
    ):

        def text(model: str) -> str:
            body = {"model": model, "prompt": "Once", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == model
            return str(answer.json()["choices"][0]["text"])

        def cards() -> dict[str, Any]:
            return {card["id"]: card["parent"] for card in client.get("/v1/models").json()["data"]}

        unclear = client.post(LOAD, json={"lora_name": "x", "lora_path": "nameless"})
        assert unclear.status_code == 400
        assert unclear.json()["error"]["param"] == "base_model_name"
        assert "'one', 'two'" in unclear.text
        assert client.post(LOAD, json={"lora_name": "x", "lora_path": "../one"}).status_code == 400
        assert client.get("/health").json()["models"] == {"one": "unloaded", "two": "unloaded"}

        loaded = client.post(LOAD, json={"lora_name": "tuned", "lora_path": "tuned"})
        assert loaded.status_code == 200, loaded.text
        assert cards() == {"one": None, "two": None, "tuned": "two"}
        named = {"lora_name": "other", "lora_path": "nameless", "base_model_name": "two"}
        assert client.post(LOAD, json=named).status_code == 200
        taken = client.post(LOAD, json={"lora_name": "tuned", "lora_path": "tuned", "base_model_name": "one"})
        assert (taken.status_code, "is a name of 'two'" in taken.text) == (400, True)
        before = text("tuned")
        assert before != text("two")

        text("one")
        assert client.get("/health").json()["models"] == {"one": "loaded", "two": "unloaded"}
        assert client.post(UNLOAD, json={"lora_name": "other"}).status_code == 200
        assert client.get("/health").json()["models"]["two"] == "unloaded", "nothing is loaded for it"
        assert client.post(UNLOAD, json={"lora_name": "other"}).status_code == 404
        assert text("tuned") == before
        assert cards() == {"one": None, "two": None, "tuned": "two"}
        assert client.post(UNLOAD, json={"lora_name": "tuned"}).status_code == 200
        assert client.post("/v1/completions", json={"model": "tuned", "prompt": "a"}).status_code == 404


def _name_base(folder: Path, base: str | None) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": base}))
