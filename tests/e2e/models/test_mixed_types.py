"""A file whose types differ by layer and tensor, as dynamic quantisations mix them, is served in as much memory as it
has bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Type

from moeserve.models.sources.gguf import names as n
from tests.support.models.model_header import q4_k_m, qwen3moe, write_header, write_weights
from tests.support.servers.process_memory import memory_of
from tests.support.servers.server import REPOSITORY, clean_environment, running_server

pytestmark = pytest.mark.slow

FLAGS = ("--max-num-seqs", "1", "--max-total-tokens", "1024", "--max-model-len", "1024")
GATE_UP = (Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ1_M)
DOWN = (Type.IQ4_XS, Type.IQ3_XXS, Type.IQ3_S, Type.Q3_K)
ATTENTION = {n.ATTN_Q: Type.Q5_K, n.ATTN_K: Type.Q8_0, n.ATTN_V: Type.Q8_0, n.ATTN_OUTPUT: Type.Q6_K}


def mixed(name: str, layers: int) -> Type:
    """The type of a matrix, as published files mix them (UD-Q2_K_XL, UD-IQ3_XXS, UD-Q3_K_XL)."""
    if not name.startswith("blk."):
        return q4_k_m(name, layers)
    _, number, tensor = name.removesuffix(".weight").split(".")
    if tensor in (n.FFN_GATE_EXPS, n.FFN_UP_EXPS):
        return GATE_UP[int(number) % len(GATE_UP)]
    if tensor == n.FFN_DOWN_EXPS:
        return DOWN[int(number) % len(DOWN)]
    return ATTENTION.get(tensor) or q4_k_m(name, layers)


def served(path: Path, layers: int) -> tuple[int, int, int]:
    """Writes a model with this number of layers and answers with it. Returns bytes: of the file, of weights
    in RAM as planned, of all processes of its server."""
    write_header(path, qwen3moe(512, num_layers=layers, num_heads=8, expert_width=512), mixed)
    write_weights(path)
    command = [
        sys.executable,
        "-m",
        "moeserve",
        "plan",
        "--model",
        str(path),
        *FLAGS,
        "--device",
        "cpu",
        "--json",
    ]
    said = subprocess.run(command, cwd=REPOSITORY, env=clean_environment(), capture_output=True, check=True)
    with running_server(path, *FLAGS) as server:
        answer = server.post(
            "/v1/completions", {"prompt": [7] * 700, "max_tokens": 8, "ignore_eos": True}, timeout=300
        )
        taken = memory_of(server)
    assert answer["usage"]["completion_tokens"] == 8
    return path.stat().st_size, json.loads(said.stdout)["memory"]["ram_weights"], taken


def test_memory_is_at_most_the_files(tmp_path: Path) -> None:
    few, many = served(tmp_path / "few.gguf", 2), served(tmp_path / "many.gguf", 10)
    assert many[0] - few[0] > 200 << 20
    file, planned, taken = (after - before for after, before in zip(many, few, strict=True))
    assert planned <= 1.05 * file
    assert taken <= 1.05 * file
