"""Several models, one of which has its worker behind TCP and TLS: real servers, a real `moeserve worker`."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import httpx
import pytest

from moeserve.cli.command_line import demonstration_model
from tests.support.servers.server import running_server
from tests.support.servers.worker_host import make_certificates, running_worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # four loads
PATIENCE_S = 600.0


def test_one_of_several_models_has_its_worker_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded, unloaded and loaded again: its worker takes the next server of the front."""
    for name in ("local", "remote"):
        shutil.copy(demonstration_model(), tmp_path / f"{name}.gguf")
    certificates = make_certificates(tmp_path / "certificates")
    with running_worker(tmp_path / "remote.gguf", certificates, "--max-total-tokens", "4096") as host:
        monkeypatch.delenv("MOESERVE_TEST_DEVICE", raising=False)  # the worker's affair
        monkeypatch.delenv("MOESERVE_TEST_FLAGS", raising=False)
        remote = {
            "model": str(tmp_path / "remote.gguf"),
            "worker": f"127.0.0.1:{host.port}",
            "worker-ssl-certfile": str(certificates / "server.pem"),
            "worker-ssl-keyfile": str(certificates / "server.key"),
            "worker-ssl-ca-certs": str(certificates / "ca.pem"),
        }
        local = {"model": str(tmp_path / "local.gguf"), "max-total-tokens": 4096}
        (tmp_path / "models.json").write_text(json.dumps([local, remote]))
        flags = ["--models-file", str(tmp_path / "models.json"), "--models-memory", "1"]
        with (
            running_server(None, *flags) as server,
            httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as client,
        ):

            def text(model: str) -> str:
                asked = {"model": model, "prompt": "Once", "max_tokens": 8, "temperature": 0}
                answer = client.post("/v1/completions", json=asked)
                assert answer.status_code == 200, answer.text + server.log
                return str(answer.json()["choices"][0]["text"])

            expected = text("local")
            for _ in range(2):
                assert text("remote") == expected
                assert client.post("/models/unload", json={"model": "remote"}).status_code == 200
                while client.get("/v1/models/remote").json()["state"] != "unloaded":
                    time.sleep(0.05)
            card = client.get("/v1/models/remote").json()
            mine = client.get("/v1/models/local").json()
            assert card["memory_bytes"]["ram"] < mine["memory_bytes"]["ram"]
