"""Which flags go where, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moeserve.cli import main as cli
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.remote.options import ENGINE_GROUPS, ENGINE_OPTIONS, check_server, parse_address, worker_options

WITH_WORKER = ServerConfig(worker="gpu.lan:7000", worker_ssl_certfile="a.pem", worker_ssl_ca_certs="ca.pem")


@pytest.mark.parametrize(
    ("text", "address"),
    [("gpu.lan:7000", ("gpu.lan", 7000)), ("10.0.0.7:0", ("10.0.0.7", 0)), ("[::1]:7000", ("::1", 7000))],
)
def test_an_address_is_read(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "--worker") == address


@pytest.mark.parametrize(
    "text", ["gpu.lan", ":7000", "gpu.lan:", "gpu.lan:x", "::1:7000", "gpu.lan:70000", ""]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--worker: must be HOST:PORT"):
        parse_address(text, "--worker")


def test_every_option_of_the_engine_exists_and_is_the_workers() -> None:
    fields = {option.name: option for option in dataclasses.fields(ServerConfig)}
    assert set(ENGINE_OPTIONS) <= fields.keys()
    assert {option.metadata["group"] for option in fields.values()} >= set(ENGINE_GROUPS)
    assert {"threads", "device", "num_gpu_experts", "max_num_seqs"} <= set(worker_options())
    assert not {"port", "api_key", "worker"} & set(worker_options())


def test_a_server_with_a_worker_elsewhere_is_accepted() -> None:
    check_server(WITH_WORKER)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ServerConfig(worker="gpu.lan:7000"), "--worker: needs --worker-ssl-certfile"),
        (
            ServerConfig(worker="gpu.lan:7000", worker_ssl_certfile="a"),
            "--worker: needs --worker-ssl-ca-certs",
        ),
        (dataclasses.replace(WITH_WORKER, threads=2), "--threads: belongs to the worker's machine"),
        (
            dataclasses.replace(WITH_WORKER, max_num_seqs=2),
            "--max-num-seqs: belongs to the worker's machine",
        ),
        (ServerConfig(worker_ssl_keyfile="a"), "--worker-ssl-keyfile: has no effect without --worker"),
    ],
)
def test_a_flag_without_effect_and_a_missing_certificate_are_refused(
    config: ServerConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_server(config)


@pytest.mark.parametrize("missing", ["--listen", "--ssl-certfile", "--ssl-ca-certs"])
def test_nothing_listens_without_certificates(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--listen": "127.0.0.1:0", "--ssl-certfile": "a.pem", "--ssl-ca-certs": "ca.pem"}
    arguments = [part for flag, value in given.items() if flag != missing for part in (flag, value)]
    with pytest.raises(SystemExit) as end:
        cli.main(["worker", *arguments])
    assert end.value.code == 2
    assert missing in capsys.readouterr().err


def test_certificates_that_cannot_be_read_end_the_start(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moeserve.processes.logs.set_up_logging", lambda *args: None)
    arguments = ["worker", "--listen", "127.0.0.1:0", "--model", str(tiny_model)]
    missing = str(tmp_path / "none.pem")
    assert cli.main([*arguments, "--ssl-certfile", missing, "--ssl-ca-certs", missing]) == 2
    assert f"--ssl-ca-certs: {missing} cannot be used: No such file" in caplog.text
