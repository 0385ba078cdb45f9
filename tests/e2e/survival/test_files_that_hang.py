"""A model on a file system that hangs (tests/support/faults/hanging_files.c), beside one that is well: the front
answers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from moeserve.cli.command_line import demonstration_model
from tests.e2e.several_models.two_models import PATIENCE_S
from tests.support.servers.server import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SOURCE = Path(__file__).parents[2] / "support" / "faults" / "hanging_files.c"
NAMES = ("well", "far")


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the model whose file system hangs while there is a file FILE.hangs."""
    library = tmp_path / "hanging_files.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    for name in NAMES:
        shutil.copy(demonstration_model(), tmp_path / f"{name}.gguf")
    file = tmp_path / "far.gguf"
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("HANGING_FILES", str(file))
    return file


def test_a_file_system_that_hangs_keeps_no_other_model_waiting(far: Path) -> None:
    hangs = Path(f"{far}.hangs")
    models = far.with_name("models.json")
    models.write_text("[" + ", ".join(f'{{"model": "{far.with_stem(name)}"}}' for name in NAMES) + "]")
    flags = ["--models-memory", "1", "--max-total-tokens", "4096", "--step-timeout", "15"]
    with (
        running_server(None, "--models-file", str(models), *flags) as server,
        httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as client,
    ):

        def ask(model: str) -> httpx.Response:
            return client.post("/v1/completions", json={"model": model, "prompt": "Once", "max_tokens": 1})

        while not all(card["memory_bytes"] for card in client.get("/v1/models").json()["data"]):
            pass
        front = server.named("front").pid
        hangs.touch()
        try:
            refused = ask("far")
            assert refused.status_code == 503
            assert "the file system of its file far.gguf does not answer" in refused.text
            assert [one["size"] > 0 for one in client.get("/api/tags").json()["models"]] == [True, False]
            assert client.post("/api/show", json={"model": "far"}).status_code == 200
            assert ask("well").status_code == 200
            assert client.get("/health").json()["models"] == {"well": "loaded", "far": "failed"}
        finally:
            hangs.unlink()
        while ask("far").status_code != 200:  # until the look that hung has ended
            pass
        assert server.named("front").pid == front, "it has not been replaced"
