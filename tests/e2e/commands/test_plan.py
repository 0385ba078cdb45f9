"""What `moeserve plan` says of memory is what a server then takes."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from moeserve.cli.command_line import demonstration_model
from moeserve.config.units import GIB
from tests.support.models.model_header import qwen3moe, write_header, write_weights
from tests.support.pictures.picture_fixture import MODEL as PICTURED
from tests.support.pictures.random_tower import QWEN36, write_random_tower
from tests.support.servers.process_memory import anonymous_peak, memory_of
from tests.support.servers.server import REPOSITORY, Server, clean_environment, running_server

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="measured for torch without CUDA's libraries"),
    pytest.mark.slow,
]
POOL = ("--max-total-tokens", "4096")


def planned(*flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "moeserve", "plan", *flags, *POOL, "--json"]
    said = subprocess.run(
        command, cwd=REPOSITORY, env=clean_environment(), capture_output=True, check=True, timeout=120
    )
    plan: dict[str, Any] = json.loads(said.stdout)
    return plan


def fill(server: Server, answer: int = 48, **fields: Any) -> None:
    """The largest step, as many rows as may run at once, and all of the KV pool. answer: tokens of each row."""
    server.post("/v1/completions", {"prompt": [7] * 1500, "max_tokens": 16, "ignore_eos": True, **fields})

    def ask(place: int) -> None:
        prompt = [8 + place] * (96 - answer)
        body = {"prompt": prompt, "max_tokens": answer, "ignore_eos": True, "logprobs": 2, **fields}
        server.post("/v1/completions", body, timeout=300)

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(ask, range(32)))
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **fields}
    server.post("/v1/chat/completions", body)
    server.post("/v1/chat/completions", body | {"response_format": {"type": "json_object"}})


def test_memory(tiny_model: Path) -> None:
    memory = planned("--model", str(tiny_model))["memory"]
    with running_server(tiny_model, *POOL) as server:
        fill(server)
        taken = memory_of(server)
    assert memory["ram_full"] == pytest.approx(taken, rel=0.03)


def test_memory_of_a_tower(tmp_path: Path) -> None:
    """The visual server and the process that decodes, at their peaks: a part of Qwen3.6's tower, and pictures up to the
    largest that is taken."""
    shape = replace(QWEN36, layers=3, output=128)
    tower = write_random_tower(tmp_path / "mmproj-random.gguf", shape)
    flags = ("--mmproj", str(tower), "--image-max-tokens", "600")
    memory = planned("--model", str(PICTURED), *flags)["memory"]
    with running_server(PICTURED, *flags, *POOL, ready_timeout=180) as server:
        for width, height in ((100, 90), (640, 480), (2000, 1500), (400, 1600), (768, 768)):
            file = io.BytesIO()
            Image.effect_noise((width, height), 64).save(file, "JPEG")
            url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
            content = [{"type": "image_url", "image_url": {"url": url}}]
            server.post(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            )
        visual = server.named("visualserver")
        taken = sum(map(anonymous_peak, [visual, *visual.children()]))
    assert memory["ram_tower"] == pytest.approx(taken, rel=0.03)


def test_memory_of_several_models(tiny_model: Path, tmp_path: Path) -> None:
    """The sum of the loaded models' needs, and what they share."""
    models = [str(demonstration_model()), str(tiny_model)]
    plan = planned(*models, "--ram", "4")
    (tmp_path / "models.json").write_text(json.dumps([{"model": model} for model in models]))
    flags = ["--models-file", str(tmp_path / "models.json"), "--models-memory", "4", *POOL]
    with running_server(None, *flags) as server:
        for model in plan["models"]:
            fill(server, model=model["name"])
        taken = memory_of(server)
    wanted = plan["common_ram_bytes"] + sum(model["ram_bytes"] for model in plan["models"])
    assert wanted == pytest.approx(taken, rel=0.03)


@pytest.fixture(scope="module")
def model_of_many_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.7 GB, nearly all of it experts."""
    path = tmp_path_factory.mktemp("model") / "experts.gguf"
    write_header(
        path,
        qwen3moe(1024, num_layers=4, num_heads=8, num_kv_heads=2, context_length=4096, vocab_size=4096),
        chat_template="{% for message in messages %}{{ message.content }}\n{% endfor %}",
    )
    write_weights(path)
    return path


@pytest.mark.timeout(600)
def test_memory_with_experts_on_disk(model_of_many_experts: Path) -> None:
    """After steps that read experts into every slot many times, the plan holds: what is read leaves nothing behind."""
    gib = 0.3
    flags = ("--expert-ram", str(gib))
    memory = planned("--model", str(model_of_many_experts), "--device", "cpu", *flags)["memory"]
    with running_server(model_of_many_experts, *POOL, *flags) as server:
        fill(server, answer=8)
        taken, metrics = memory_of(server), server.metrics()
    assert metrics["moeserve:expert_disk_bytes_total"] > 3 * gib * GIB
    assert memory["ram_full"] == pytest.approx(taken, rel=0.03)
