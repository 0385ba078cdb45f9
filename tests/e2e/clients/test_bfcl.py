"""The Berkeley Function Calling Leaderboard's own program (bfcl-eval on PyPI), its live and multi-turn categories, end
to end: no request may fail.

It needs MOESERVE_BFCL, a virtual environment that `make test-bfcl` makes. MOESERVE_BFCL_TESTS is how many tests of each
category are run, spread over all of them; 0: all 3,051, which takes hours. `-s` prints what the small model scores.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeserve.cli.command_line import demonstration_model
from tests.support.servers.server import Server, running_server

BFCL = os.environ.get("MOESERVE_BFCL")
TESTS = int(os.environ.get("MOESERVE_BFCL_TESTS", "6"))
# A name that the program knows and asks with the tools API; it goes to the server that OPENAI_BASE_URL names.
MODEL = "gpt-4.1-2025-04-14"
CATEGORIES = (
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
    *("live_irrelevance", "live_relevance"),
    *("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context"),
)
CONTEXT = 1 << 15  # a test of several turns has 8,000 tokens of tools

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BFCL is None, reason="run make test-bfcl")]


def with_longer_context(path: Path) -> Path:
    """A copy of the demonstration model whose header says CONTEXT. It was not trained for it; its score shows."""
    shutil.copy(demonstration_model(), path)
    content = bytearray(path.read_bytes())
    key = b"qwen3moe.context_length"
    start = content.index(key) + len(key)
    kind, _ = struct.unpack_from("<II", content, start)
    assert kind == 4  # GGUF's uint32
    struct.pack_into("<I", content, start + 4, CONTEXT)
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = with_longer_context(tmp_path_factory.mktemp("model") / "demo.gguf")
    shortly = '{"max_new_tokens": 256}'  # the program sets no bound, and the model would go on for long
    flags = ("--served-model-name", MODEL, "--override-generation-config", shortly)
    with running_server(model, *flags) as running:
        yield running


def bfcl(server: Server, folder: Path, *arguments: str) -> None:
    environment = {
        **os.environ,
        "BFCL_PROJECT_ROOT": str(folder),
        "OPENAI_BASE_URL": server.base_url + "/v1",
        "OPENAI_API_KEY": "none",
    }
    command = [str(Path(str(BFCL)).resolve() / "bin" / "bfcl"), *arguments, "--model", f"{MODEL}-FC"]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


def data(category: str) -> list[dict[str, Any]]:
    (file,) = Path(f"{BFCL}/lib").glob(f"python*/site-packages/bfcl_eval/data/BFCL_v*_{category}.json")
    return [json.loads(line) for line in file.read_text().splitlines()]


def chosen(category: str) -> list[str]:
    ids = [str(row["id"]) for row in data(category)]
    return ids[:: max(1, len(ids) // TESTS)][:TESTS] if TESTS else ids


@pytest.mark.timeout(12 * 3600)
def test_no_request_of_the_leaderboard_fails(server: Server, tmp_path: Path) -> None:
    asked = {category: chosen(category) for category in CATEGORIES}
    (tmp_path / "test_case_ids_to_generate.json").write_text(json.dumps(asked))
    bfcl(server, tmp_path, "generate", "--run-ids", "--num-threads", "8")
    failed, answered = [], 0
    for category, ids in asked.items():
        (file,) = tmp_path.rglob(f"BFCL_v*_{category}_result.json")
        rows = {row["id"]: row for row in map(json.loads, file.read_text().splitlines())}
        assert set(rows) == set(ids)
        answered += len(rows)
        failed += [
            f"{row['id']}: {row['result']}"
            for row in rows.values()
            if "Error during inference" in str(row["result"])
        ]
    counts = server.metrics()
    requests, prompt = counts["moeserve:request_success_total"], counts["moeserve:prompt_tokens_total"]
    print(f"{answered} tests, {requests:.0f} requests, {prompt:.0f} prompt tokens")
    assert failed == []
    assert "Traceback" not in server.log
    bfcl(server, tmp_path, "evaluate", "--partial-eval", "--test-category", ",".join(CATEGORIES))
    for score in sorted(tmp_path.rglob("BFCL_v*_score.json")):
        print(score.stem, score.read_text().splitlines()[0])
