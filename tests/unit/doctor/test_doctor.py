"""`moeserve doctor`: each finding has its level, what is wrong and the remedy."""

from __future__ import annotations

import http.server
import json
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from huggingface_hub import constants

from moeserve.cli import main as cli
from moeserve.cli.doctor import command, machine, probes
from moeserve.cli.doctor.finding import Finding
from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.processes.gpu_driver import driver_version


def test_a_line_and_its_remedy_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding("memory", "ok", "9 GiB free"), Finding("disk", "warning", "1 GB free", "make room")]
    monkeypatch.setattr(command, "_checks", lambda config: iter(found))
    assert cli.main(["doctor"]) == 0
    first, second, remedy = capsys.readouterr().out.splitlines()
    assert first.split(maxsplit=2) == ["ok", "memory", "9 GiB free"]
    assert second.split(maxsplit=2) == ["warning", "disk", "1 GB free"]
    assert remedy.strip() == "-> make room"
    found.append(Finding("port", "error", "port 8000 is in use", "choose another"))
    assert cli.main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert document["findings"][2] == {
        "subject": "port",
        "level": "error",
        "text": "port 8000 is in use",
        "remedy": "choose another",
    }


def test_all_checks_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes, which load torch, are left to their own test."""
    monkeypatch.setattr(probes, "run_probe", lambda name: [Finding(name, "ok", "")])
    found = list(command._checks(ServerConfig(port=0)))
    subjects = {one.subject for one in found}
    assert {
        "cores",
        "memory",
        "swap",
        "huge pages",
        "memlock",
        "port",
        "disk",
        "extension",
        "gpu",
    } <= subjects
    assert all(one.remedy for one in found if one.level != "ok")


@pytest.mark.parametrize(
    ("free", "swapped", "levels"),
    [
        (GIB // 2, 0, ["error", "ok"]),
        (4 * GIB, 0, ["warning", "ok"]),
        (40 * GIB, 3 * GIB, ["ok", "warning"]),
    ],
)
def test_memory(free: int, swapped: int, levels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    swap = psutil.swap_memory()._replace(total=8 * GIB, used=swapped)
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap)
    monkeypatch.setattr(machine, "available_bytes", lambda: free)
    found = list(machine.check_memory())
    assert [one.level for one in found] == levels
    assert f"{free / GIB:.1f} GiB free" in found[0].text


@pytest.mark.parametrize(
    ("text", "level", "remedy"),
    [
        ("always [madvise] never", "ok", ""),
        ("[always] madvise never", "ok", ""),
        (
            "always madvise [never]",
            "warning",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        (None, "warning", "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE; a sandbox such as gVisor has none"),
    ],
)
def test_huge_pages(text: str | None, level: str, remedy: str, tmp_path: Path) -> None:
    if text is not None:
        path = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
        path.parent.mkdir(parents=True)
        path.write_text(text + "\n")
    found = machine.check_huge_pages(tmp_path)
    assert (found.level, found.remedy) == (level, remedy)


def test_one_core_is_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda root: 1)
    monkeypatch.setattr(machine, "cpu_quota", lambda root: 1)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    found = machine.check_cores()
    assert found.level == "warning"
    assert (
        "1 physical core for this process, of 64 logical CPUs (a control group allows the time of 1)"
        in found.text
    )


@pytest.mark.parametrize(
    ("files", "subject", "level"),
    [(100, "limits", "error"), (1024, "open files", "warning"), (resource.RLIM_INFINITY, "open files", "ok")],
)
def test_open_files(files: int, subject: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.getrlimit

    def limits(kind: int) -> tuple[int, int]:
        return (files, files) if kind == resource.RLIMIT_NOFILE else real(kind)

    monkeypatch.setattr(resource, "getrlimit", limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: None)
    first, memlock = machine.check_limits()
    assert (first.subject, first.level, memlock.level) == (subject, level, "ok")
    assert bool(first.remedy) == (level != "ok")


@pytest.mark.parametrize(("allowed", "level"), [(1000, "ok"), (20, "error")])
def test_what_a_running_server_leaves_of_the_tasks_is_no_error(
    allowed: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeserve.processes.limits.tasks_left", lambda: 3)
    monkeypatch.setattr("moeserve.processes.limits.tasks_allowed", lambda: allowed)
    found = next(iter(machine.check_limits()))
    assert found.level == level
    assert level == "ok" or found.text.startswith("the control group allows 20 processes and threads")


@pytest.mark.parametrize(
    ("limit", "told"), [(8 << 20, "8 MiB: RAM slots of experts on disk"), (None, "no limit: RAM slots")]
)
def test_locked_memory(limit: int | None, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "lockable_bytes", lambda: limit)
    memlock = list(machine.check_limits())[-1]
    assert (memlock.subject, memlock.level) == ("memlock", "ok")
    assert memlock.text.startswith(told)


class Models(http.server.BaseHTTPRequestHandler):
    """/v1/models of the server's `document`."""

    def do_GET(self) -> None:
        status, document = self.server.answer  # type: ignore[attr-defined]
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def answering(status: int, document: object) -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Models)
    server.answer = (status, document)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


OURS = {"data": [{"id": "qwen3", "owned_by": "moeserve", "context_length": 4096}]}


@pytest.mark.parametrize(
    ("status", "document", "level", "text"),
    [
        (200, OURS, "ok", "a moeserve server answers at http://127.0.0.1:{port}: qwen3"),
        (200, {"data": [{"id": "x", "owned_by": "vllm"}]}, "error", "port {port} of 0.0.0.0 is in use"),
        (200, ["other"], "error", "is in use"),
        (404, {}, "error", "is in use"),
        (401, {}, "warning", "the server at http://127.0.0.1:{port} needs an API key"),
    ],
)
def test_a_port_in_use(
    status: int, document: object, level: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # for other hosts
    with answering(status, document) as port:
        found = machine.check_port(ServerConfig(host="0.0.0.0", port=port))
    assert found.level == level
    assert text.format(port=port) in found.text


def test_a_port_of_a_program_that_speaks_no_http(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closer = threading.Thread(target=lambda: listener.accept()[0].close())
        closer.start()
        found = machine.check_port(ServerConfig(port=listener.getsockname()[1]))
        closer.join()
    assert (found.level, "ss -ltnp" in found.remedy) == ("error", True)
    assert machine.check_port(ServerConfig(uds=str(tmp_path / "api"))).level == "ok"
    assert list(tmp_path.iterdir()) == [], "the socket of the check is gone"


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr("os.access", lambda path, mode: path == tmp_path)
    for free, level in ((10**9, "warning"), (10**12, "ok")):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: _Usage(free))
        found = machine.check_disk()
        assert (found.level, f"{free / 1e9:.1f} GB free" in found.text) == (level, True)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    found = machine.check_disk()
    assert (found.level, found.remedy) == ("error", "put the cache elsewhere: HF_HUB_CACHE"), (
        "room is no remedy"
    )


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "the check was ended by SIGILL"),
        (
            "raise OSError('libcudart.so.12: cannot open')",
            "the check failed: OSError: libcudart.so.12: cannot open",
        ),
        ("import time; time.sleep(60)", "the check did not end within 0.5 s"),
    ],
)
def test_a_probe_that_ends_badly_is_a_finding(
    module: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build for another CPU is killed by the kernel at its first instruction that is not there."""
    (tmp_path / "broken.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(probes, "__name__", "broken")
    (found,) = probes.run_probe("extension", deadline_s=0.5 if "sleep" in module else 60)
    assert (found.level, found.text, bool(found.remedy)) == ("error", text, True)


def test_gpus_that_are_there(tmp_path: Path) -> None:
    assert (driver_version(tmp_path), probes._has_nvidia_device(tmp_path)) == (None, False)
    for name, vendor, kind in (("0", "0x10de", "0x040300"), ("1", "0x8086", "0x030000")):
        device = tmp_path / f"sys/bus/pci/devices/0000:00:0{name}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    assert not probes._has_nvidia_device(tmp_path), "its sound device, and another's display"
    (device / "vendor").write_text("0x10de\n")
    assert probes._has_nvidia_device(tmp_path)
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\nGCC version: 12\n"
    )
    assert driver_version(tmp_path) == "570.86.15"


def test_a_gpu_without_a_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "driver_version", lambda: None)
    monkeypatch.setattr(probes, "_has_nvidia_device", lambda: True)
    (found,) = probes.gpu()
    assert found.level == "warning"
    assert "no driver" in found.text
