"""GGUF files that are damaged or not for us: the server says why and ends, without a traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from gguf import GGUFReader

from moeserve.launcher.exit_codes import EXIT_ENGINE_LOST
from tests.e2e.completions import completion
from tests.support.servers.server import Server, clean_environment, command, running_server

NAME_LENGTH, NAME, DIMENSION_COUNT, DIMENSIONS, TYPE, OFFSET = range(6)  # the parts of gguf-py's tensor field
VICTIM = "blk.1.ffn_down_exps.weight"
Damage = Callable[[Path], None]


def truncate_to(share: float) -> Damage:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def overwrite_with(content: bytes) -> Damage:
    def damage(path: Path) -> None:
        path.write_bytes(content)

    return damage


def in_tensor(part: int, values: int | list[int]) -> Damage:
    """Overwrites a part of VICTIM's entry in the header."""

    def damage(path: Path) -> None:
        reader = GGUFReader(path, "r+")
        (tensor,) = (tensor for tensor in reader.tensors if tensor.name == VICTIM)
        tensor.field.parts[part][:] = values
        reader.data.flush()

    return damage


def in_text(key: str, text: str) -> Damage:
    """Overwrites a text of the metadata with one that is as long, or shorter: blanks fill the rest."""

    def damage(path: Path) -> None:
        reader = GGUFReader(path, "r+")
        value = reader.fields[key].parts[-1]
        value[:] = np.frombuffer(text.encode().ljust(len(value)), np.uint8)
        reader.data.flush()

    return damage


def in_number(key: str, value: int) -> Damage:
    def damage(path: Path) -> None:
        reader = GGUFReader(path, "r+")
        reader.fields[key].parts[-1][0] = value
        reader.data.flush()

    return damage


def in_array_length(key: str, length: int) -> Damage:
    """Overwrites the length of an array of the metadata: name length, name, type, item type, then this."""

    def damage(path: Path) -> None:
        reader = GGUFReader(path, "r+")
        reader.fields[key].parts[4][0] = length
        reader.data.flush()

    return damage


DAMAGES: dict[str, tuple[Damage, list[str]]] = {
    # name: (what is done to the file, words that the message must have)
    "empty": (truncate_to(0), ["empty"]),
    "not a GGUF file": (overwrite_with(b"This is a text file.\n" * 100), ["GGUF"]),
    "truncated in the weights": (truncate_to(0.7), ["download broke off"]),
    "truncated in the header": (truncate_to(0.005), []),
    "tensor beyond the end": (in_tensor(OFFSET, 1 << 43), [VICTIM]),
    "dimension too large": (in_tensor(DIMENSIONS, [1 << 60, 256, 8]), [VICTIM]),
    "dimension product overflows": (in_tensor(DIMENSIONS, [1 << 33, 1 << 33, 8]), [VICTIM]),
    "dimension of zero": (in_tensor(DIMENSIONS, [256, 0, 8]), [VICTIM]),
    "wrong shape": (in_tensor(DIMENSIONS, [256, 128, 8]), [VICTIM]),
    "unknown type": (in_tensor(TYPE, 250), [VICTIM, "250"]),
    "type that is not served": (in_tensor(TYPE, 15), [VICTIM, "Q8_K"]),
    "wrong architecture": (in_text("general.architecture", "lamaXmoe"), ["lamaXmoe", "qwen3moe"]),
    "absurd array": (in_array_length("tokenizer.ggml.tokens", 1 << 60), ["tokenizer.ggml.tokens"]),
    "absurd layer count": (in_number("qwen3moe.block_count", 1 << 30), ["block_count"]),
    "no heads": (in_number("qwen3moe.attention.head_count", 0), ["head_count"]),
}


def failed_start(model: Path) -> str:
    """Starts a server that must not come up; returns what it wrote."""
    result = subprocess.run(
        command(model, "--port", "0"), env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    output = result.stdout + result.stderr
    assert result.returncode not in (0, None), output
    assert result.returncode > 0, f"ended by signal {-result.returncode}: {output}"
    assert "Traceback" not in output, output
    return output


# A start each; the others' texts are read without one in tests/unit/models/sources/test_gguf_malformed.py.
SERVED = ("not a GGUF file", "truncated in the weights", "absurd array")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SERVED else pytest.mark.slow) for name in DAMAGES],
)
def test_damaged_file_is_refused_with_its_cause(name: str, tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "damaged.gguf"
    shutil.copy(tiny_model, model)
    damage, words = DAMAGES[name]
    damage(model)
    output = failed_start(model)
    for word in ["damaged.gguf", *words]:
        assert word in output, output


@pytest.mark.parametrize("name", ["wrong architecture", "wrong shape"])
def test_a_file_is_refused_before_torch_is_imported(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes seconds; here it never ends."""
    model = tmp_path / "damaged.gguf"
    shutil.copy(tiny_model, model)
    damage, words = DAMAGES[name]
    damage(model)
    (tmp_path / "torch.py").write_text("import threading; threading.Event().wait()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output = failed_start(model)
    for word in ["damaged.gguf", *words]:
        assert word in output, output


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    assert "nothing.gguf" in failed_start(tmp_path / "nothing.gguf")
    assert str(tmp_path) in failed_start(tmp_path)


def test_split_set_with_a_part_missing(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model, tmp_path / "m-00001-of-00002.gguf")
    assert "m-00002-of-00002.gguf" in failed_start(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.slow
@pytest.mark.waits_for_processes("a sandbox is replaced within 20 s by the clock")
def test_template_that_loops_for_ever_harms_only_its_own_request(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "looping.gguf"
    shutil.copy(tiny_model, model)
    loop = "{% for i in range(99999) %}"
    in_text("tokenizer.chat_template", loop * 4 + "{% endfor %}" * 4)(model)
    with running_server(model) as server:
        expected = completion(server, prompt="Hello")
        started = time.monotonic()
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        response = httpx.post(server.base_url + "/v1/chat/completions", json=chat, timeout=60)
        assert response.status_code == 400
        assert "template" in response.json()["error"]["message"]
        assert time.monotonic() - started < 20
        assert completion(server, prompt="Hello") == expected


@pytest.mark.slow
@pytest.mark.cpu_engine("a GPU's experts in RAM are never the file's own pages")
def test_a_file_cut_short_while_it_is_served_from_ends_the_server_with_its_cause(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "shrinking.gguf"
    shutil.copy(tiny_model, model)
    server = Server(model, "--weight-layout", "file")
    try:
        os.truncate(model, 1 << 20)
        body = {"prompt": "Hello", "max_tokens": 1}
        with suppress(httpx.TransportError, httpx.HTTPStatusError):
            server.post("/v1/completions", body)
        assert server.process.wait(60) == EXIT_ENGINE_LOST
        assert "was the model's file cut short" in server.log
        assert "processes crashed 3 times in a minute" in server.log
    finally:
        server.kill()
