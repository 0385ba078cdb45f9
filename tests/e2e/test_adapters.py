"""LoRA adapters in a server: models of their own, chosen by the request, each with its own cached prompts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.server import Server, running_server
from tests.support.hugging_face_model import write_model
from tests.support.peft_adapters import ATTENTION, EXPERTS, ROUTER, write_adapter

pytestmark = pytest.mark.cpu_engine("adapters")
NAMES = ("tiny", "first", "second")
PROMPT = "The quick brown fox jumps over the lazy dog. " * 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("adapters")
    write_model(folder / "model")
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for seed, name in enumerate(NAMES[1:]):
        write_adapter(folder / name, base, seed, r=4, lora_alpha=8, target_modules=ATTENTION,
                      target_parameters=[ROUTER, *EXPERTS])  # fmt: skip
    modules = [f"{name}={folder / name}" for name in NAMES[1:]]
    with running_server(
        folder / "model", "--served-model-name", "tiny", "--lora-modules", *modules
    ) as started:
        yield started


def complete(server: Server, model: str, prompt: str = PROMPT, **more: object) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body | more)


def test_each_adapter_is_a_model(server: Server) -> None:
    cards = {card["id"]: card for card in httpx.get(server.base_url + "/v1/models").json()["data"]}
    assert list(cards) == list(NAMES)
    assert [card["parent"] for card in cards.values()] == [None, "tiny", "tiny"]
    assert Path(cards["first"]["root"]).name == "first"
    assert httpx.get(server.base_url + "/v1/models/second").json() == cards["second"]
    refused = httpx.post(server.base_url + "/v1/completions", json={"model": "third", "prompt": "a"})
    assert refused.status_code == 404
    assert "'first'" in refused.text


def test_answers_are_the_adapters_own_alone_and_in_a_crowd(server: Server) -> None:
    alone = {name: complete(server, name) for name in NAMES}
    assert [answer["model"] for answer in alone.values()] == list(NAMES)
    texts = {name: answer["choices"][0]["text"] for name, answer in alone.items()}
    assert len(set(texts.values())) == 3
    with ThreadPoolExecutor(9) as pool:
        crowd = list(pool.map(lambda name: (name, complete(server, name)["choices"][0]["text"]), NAMES * 3))
    assert all(text == texts[name] for name, text in crowd)


def test_a_cached_prompt_is_of_one_adapter(server: Server) -> None:
    prompt = "A prompt that nobody has asked before, and that is long enough to be seen. " * 4

    def cached(name: str) -> int:
        usage = complete(server, name, prompt)["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached(name) for name in NAMES] == [0, 0, 0]
    assert all(cached(name) > 50 for name in NAMES)


def test_a_chat_names_its_adapter(server: Server) -> None:
    body = {"model": "first", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert server.post("/v1/chat/completions", body)["model"] == "first"


def test_a_bad_adapter_ends_the_start(server: Server, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    with pytest.raises(RuntimeError, match="use_dora"):
        Server(None, "--lora-modules", f"bad={tmp_path / 'bad'}")
