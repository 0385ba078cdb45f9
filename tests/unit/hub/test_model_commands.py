"""`moeserve pull`, `list`, `show` and `rm`, with a local hub over real HTTP."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from moeserve.cli import main as cli
from moeserve.cli.command_line import demonstration_model
from moeserve.hub import cache
from moeserve.processes import gpu_driver
from tests.support.servers.hub_server import COMMIT, Hub, running_hub

REPO = "acme/tiny-GGUF"
Q8, Q4 = f"{REPO}:tiny-Q8_0.gguf", f"{REPO}:sub/tiny-Q4_K_M-00001-of-00002.gguf"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model, and a split set of which only names and sizes matter."""
    folder = tmp_path_factory.mktemp("hub") / REPO
    (folder / "sub").mkdir(parents=True)
    shutil.copy(demonstration_model(), folder / "tiny-Q8_0.gguf")
    for part in (1, 2):
        (folder / f"sub/tiny-Q4_K_M-0000{part}-of-00002.gguf").write_bytes(b"GGUF" + bytes([part]) * 149_996)
    return folder.parents[1]


@pytest.fixture
def hub(repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("moeserve.processes.logs.set_up_logging", lambda *args: None)
    monkeypatch.setattr("moeserve.cli.models.need.driver_version", lambda: None)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with running_hub(repositories) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield running


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    capsys.readouterr()
    assert cli.main(["list", "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_a_model_comes_is_listed_shown_and_goes(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["list"]) == 0
    assert "no models in" in capsys.readouterr().out

    assert cli.main(["show", f"{REPO}:Q8_0"]) == 0
    shown = capsys.readouterr().out
    assert f"{REPO}:Q8_0: not downloaded" in shown
    assert "moeserve pull acme/tiny-GGUF:Q8_0" in shown
    assert hub.downloads() == []

    assert cli.main(["pull", f"{REPO}:Q8_0"]) == 0
    assert "GiB RAM at first" in capsys.readouterr().out
    assert cli.main(["pull", f"{REPO}:q4_k_m"]) == 0
    both = listed(capsys)
    assert set(both) == {Q8, Q4}
    assert both[Q4]["bytes"] == 300_000
    assert "2,048 tokens a request" in str(both[Q8]["needs"])
    assert str(both[Q4]["needs"]).startswith("not here: ")
    assert cli.main(["list"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "SIZE", "MODIFIED", "NEEDS", "HERE"]
    assert [row.split()[0] for row in rows] == [Q4, Q8]

    assert cli.main(["show", f"{REPO}:Q8_0"]) == 0
    assert "6, 16 experts, 4 a token" in capsys.readouterr().out

    assert cli.main(["rm", "--yes", Q4]) == 0
    assert set(listed(capsys)) == {Q8}
    blobs = list((tmp_path / "cache").glob("models--*/blobs/*"))
    assert len(blobs) == 1, "the contents of the split set are gone"
    assert cli.main(["rm", "--yes", Q4]) == 1
    assert "acme/tiny-GGUF" in capsys.readouterr().err

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        "builtins.input", lambda question: "n" if "8.1 MB" in question or "MB" in question else "y"
    )
    assert cli.main(["rm", Q8]) == 1
    assert set(listed(capsys)) == {Q8}
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert cli.main(["rm", f"{REPO}:Q8_0"]) == 0
    assert listed(capsys) == {}
    assert list((tmp_path / "cache").glob("models--*")) == []


def test_an_interrupted_split_set_is_told(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pull", f"{REPO}:Q4_K_M"]) == 0
    (part,) = (tmp_path / "cache").rglob("tiny-Q4_K_M-00002-of-00002.gguf")
    part.unlink()
    assert listed(capsys)[Q4]["needs"] == "parts are missing: pull it again"
    assert cli.main(["rm", "--yes", f"{REPO}:Q4_K_M"]) == 0
    assert listed(capsys) == {}


def test_what_an_interrupted_download_has_left_goes(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blobs = tmp_path / "cache" / "models--acme--tiny-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0123.incomplete").write_bytes(bytes(5000))
    assert cli.main(["rm", "--yes", f"{REPO}:Q8_0"]) == 0
    assert "5.0 kB of an interrupted download" in capsys.readouterr().out
    assert list(blobs.iterdir()) == []


def test_a_revision_keeps_its_name(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", f"{REPO}@v1.0:Q8_0"]) == 0
    assert set(listed(capsys)) == {f"{REPO}@v1.0:tiny-Q8_0.gguf"}
    assert COMMIT in str(cache.cached_models()[0].path)
    assert cli.main(["rm", "--yes", f"{REPO}@{COMMIT}:Q8_0"]) == 0
    assert listed(capsys) == {}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pull", "./model.gguf"], 2, "'./model.gguf' is not a name on the Hub"),
        (["pull", f"hf.co/{REPO}:Q8_0"], 2, f"is named without it: {REPO}:Q8_0"),
        (["show", f"https://huggingface.co/{REPO}"], 1, f"is named without it: {REPO}"),
        (["plan", "--model", "file:///a.gguf"], 2, "file:///a.gguf is an address; name a path"),
        (["pull", "acme/none"], 1, "neither a local path nor a repository"),
        (["pull", f"{REPO}:Q2_K"], 1, "nothing fits 'Q2_K'"),
        (["show", "acme/none"], 1, "neither a local path nor a repository"),
        (["show", "/no/such.gguf"], 1, "there is no /no/such.gguf"),
        (["rm", Q8], 1, "see moeserve list"),
        (
            ["rm", "--yes", "/a/file.gguf"],
            2,
            "is not a name on the Hub; to delete a file of your own, use rm",
        ),
        (["rm", "--yes", Q8], 1, "see moeserve list"),
    ],
)
def test_what_cannot_be(
    arguments: list[str], code: int, message: str, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = cli.main(arguments)
    except SystemExit as end:
        ended = int(end.code or 0)
    assert ended == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "but a Git LFS pointer"),
        (b"<!DOCTYPE html>" * 100, "but a web page"),
        (b"once upon a time", "as it begins with b'once'"),
    ],
)
def test_a_file_that_is_a_model_by_its_name_alone_is_not_kept(
    content: bytes, message: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = hub.root / "acme/wrong-GGUF/wrong-Q8_0.gguf"
    wrong.parent.mkdir(exist_ok=True)
    wrong.write_bytes(content)
    assert cli.main(["pull", "acme/wrong-GGUF"]) == 1
    shown = capsys.readouterr()
    assert f"wrong-Q8_0.gguf on {hub.url} is not a GGUF file {message}" in shown.err
    assert shown.out == ""
    assert listed(capsys) == {}
    assert [path for path in (tmp_path / "cache").rglob("blobs/*") if path.is_file()] == []
    wrong.unlink()
    wrong.parent.rmdir()


def test_such_a_file_of_another_program_is_told(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pull", Q8]) == 0
    (file,) = (tmp_path / "cache").rglob("snapshots/*/tiny-Q8_0.gguf")
    file.write_bytes(b"<html>")
    capsys.readouterr()
    assert cli.main(["pull", Q8]) == 1
    assert "is not a GGUF file but a web page" in (said := capsys.readouterr().err)
    assert f"moeserve rm {Q8} removes it" in said
    assert cli.main(["rm", "--yes", Q8]) == 0
    assert listed(capsys) == {}


def test_nothing_is_removed_where_no_terminal_can_be_asked_at(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pull", Q8]) == 0
    with pytest.raises(SystemExit) as end:
        cli.main(["rm", Q8])
    assert end.value.code == 2
    assert "there is no terminal to ask on: use --yes" in capsys.readouterr().err
    assert set(listed(capsys)) == {Q8}


@pytest.mark.parametrize("command", ["list", "show", "rm", "pull"])
def test_a_cache_of_another_user_is_told(
    command: str,
    hub: Hub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the system says of a folder that may be neither read nor written, to root as well."""
    (tmp_path / "cache").mkdir()

    def refused(path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(tmp_path / "cache"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real[kwargs.pop("of")](path, *args, **kwargs)

    real: dict[str, Callable[..., Any]] = {"listdir": os.listdir, "mkdir": os.mkdir}
    for name in real:
        monkeypatch.setattr(os, name, functools.partial(refused, of=name))
    assert cli.main([command, *([] if command == "list" else [Q8])]) == 1
    told = capsys.readouterr().err
    assert "Permission denied; name a folder of your own in HF_HUB_CACHE" in told
    assert str(tmp_path / "cache") in told


def test_a_file_in_the_caches_place_is_told(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").touch()
    assert cli.main(["list"]) == 1
    assert f"the cache {tmp_path}/cache is not a folder; name one in HF_HUB_CACHE" in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_told_before_anything_comes(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert cli.main(["show", Q8]) == 0
    assert "the disk is too small" in capsys.readouterr().out
    assert cli.main(["pull", Q8]) == 1
    assert "make room" in capsys.readouterr().err
    assert hub.downloads() == []


def test_a_driver_is_seen_without_torch(tmp_path: Path) -> None:
    assert gpu_driver.driver_version(tmp_path) is None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert gpu_driver.driver_version(tmp_path) == "of Windows (WSL)"
