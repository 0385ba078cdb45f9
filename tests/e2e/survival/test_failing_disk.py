"""A server whose experts are on a disk that is slow, hangs, fails or has another file: no wrong token, no endless
stream, and an error that says why."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.conftest import TINY_MODEL
from tests.support.servers.server import REPOSITORY, Server, stream_events

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.one_gpu("with several GPUs no expert is on disk"),
]
EXPERT_RAM = "0.0018"  # GiB: slots for 5 experts of each layer
PROMPTS = [[3 * place + i for i in range(12)] for place in range(4)]


class FailingDisk:
    """Switches the faults of a server's disk (faulty_reads.c)."""

    def __init__(self, server: Server, folder: Path, model: Path) -> None:
        self.server, self.folder, self.model = server, folder, model

    def begin(self, fault: str) -> None:
        (self.folder / fault).touch()

    def end(self, fault: str) -> None:
        (self.folder / fault).unlink()

    def ask(self, prompt: list[int], max_tokens: int = 24) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return httpx.post(self.server.base_url + "/v1/completions", json=body, timeout=300)

    def error(self) -> str:
        """The message at the end of a stream whose prompt needs all experts."""
        body = {"prompt": list(range(500, 560)), "max_tokens": 4, "stream": True}
        with httpx.stream(
            "POST", self.server.base_url + "/v1/completions", json=body, timeout=300
        ) as response:
            events = (
                list(stream_events(response))
                if response.status_code == 200
                else [json.loads(response.read())]
            )
        return str(events[-1]["error"]["message"])

    def texts(self) -> list[str]:
        """The answers of streams side by side."""
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(self.ask, PROMPTS))
        assert [answer.status_code for answer in answers] == [200] * len(PROMPTS), answers[0].text
        return [answer.json()["choices"][0]["text"] for answer in answers]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailingDisk]:
    folder = tmp_path_factory.mktemp("faults")
    library, model = folder / "faulty_reads.so", Path(shutil.copy(TINY_MODEL, folder / "model.gguf"))
    source = REPOSITORY / "tests" / "support" / "faults" / "faulty_reads.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("DISK_FAULTS", str(folder))
        server = Server(model, "--expert-ram", EXPERT_RAM)
    try:
        yield FailingDisk(server, folder, model)
    finally:
        server.kill()


@pytest.fixture(scope="module")
def expected(disk: FailingDisk) -> list[str]:
    return disk.texts()


def test_a_disk_that_is_slow_for_30_s(disk: FailingDisk, expected: list[str]) -> None:
    disk.begin("is_slow")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(disk.texts)
        time.sleep(30)
        assert httpx.get(disk.server.base_url + "/health", timeout=10).status_code == 200
        disk.end("is_slow")
        assert found.result() == expected


def test_a_disk_that_hangs(disk: FailingDisk, expected: list[str]) -> None:
    """The worker gives up on it, once a step, and is not itself taken for hung."""
    worker = disk.server.named("worker").pid
    disk.begin("hangs")
    assert "could not be read from disk: no read has ended in time" in disk.error()
    assert httpx.get(disk.server.base_url + "/health", timeout=10).status_code == 200
    disk.end("hangs")
    assert disk.texts() == expected
    assert disk.server.named("worker").pid == worker


def test_a_disk_that_fails(disk: FailingDisk, expected: list[str]) -> None:
    disk.begin("fails")
    assert "could not be read from disk: Input/output error" in disk.error()
    disk.end("fails")
    assert disk.texts() == expected
    assert disk.server.metrics()["moeserve:expert_disk_errors_total"] > 0


def test_a_file_that_is_replaced(disk: FailingDisk, expected: list[str]) -> None:
    """It is read as it was, until a worker starts again: that one refuses the new file with its cause."""
    other = disk.folder / "other.gguf"
    shutil.copy(TINY_MODEL, other)
    other.replace(disk.model)
    assert disk.texts() == expected
    disk.server.named("worker").kill()
    assert disk.server.process.wait(120) != 0
    assert "was replaced or changed since it was loaded; restart the server" in disk.server.log
