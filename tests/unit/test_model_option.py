"""Which model --model means, and what is said of one that is not there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from moeserve.cli import command_line
from moeserve.cli import main as cli
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.processes.cpus import pool_threads
from tests.support.servers.server import REPOSITORY


def test_no_model_is_the_packaged_one() -> None:
    config = command_line.resolve(ServerConfig())
    assert Path(config.model).samefile(REPOSITORY / "moeserve/assets/moeserve-demo-q8_0.gguf")
    assert config.served_model_name == "moeserve-demo-q8_0"
    assert config.threads == pool_threads(config.device)


def test_model_path_becomes_absolute(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_model.parent)
    assert command_line.resolve(ServerConfig(model=tiny_model.name)).model == str(tiny_model)


def test_split_set_and_folder_are_named_after_the_model(tmp_path: Path) -> None:
    part = tmp_path / "qwen-00001-of-00002.gguf"
    part.touch()
    assert command_line.resolve(ServerConfig(model=str(part))).served_model_name == "qwen"
    assert command_line.resolve(ServerConfig(model=str(tmp_path))).served_model_name == "qwen"
    assert command_line.resolve(ServerConfig(model=str(part), served_model_name="q")).served_model_name == "q"


def test_missing_model_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moeserve.processes.logs.set_up_logging", lambda *args: None)
    for path, message in (
        (tmp_path / "no.gguf", f"there is no {tmp_path}/no.gguf"),
        (tmp_path, "neither a .gguf file nor a config.json"),
    ):
        assert cli.main(["--model", str(path)]) == 2
        assert message in caplog.text
        caplog.clear()


@pytest.mark.parametrize("command", [["--model"], ["plan", "--model"]])
def test_what_is_no_model_is_told_before_anything_starts(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("moeserve.processes.logs.set_up_logging", lambda *args: None)
    page = tmp_path / "model.gguf"
    page.write_text("<!DOCTYPE html><html>Not found</html>")
    with contextlib.suppress(SystemExit):
        assert cli.main([*command, str(page)]) == 2
    told = caplog.text + capsys.readouterr().err
    assert f"{page}: this is not a GGUF file but a web page" in told


def test_a_link_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    """Its own name was proposed, as the most similar one."""
    (tmp_path / "model.gguf").symlink_to("/no/such/disk/model.gguf")
    with pytest.raises(ConfigError) as error:
        command_line.resolve(ServerConfig(model=str(tmp_path / "model.gguf")))
    assert str(error.value).endswith(
        "model.gguf; it is a link to /no/such/disk/model.gguf, which is not there"
    )


def test_a_download_of_aria2_that_goes_on_is_told(tmp_path: Path, tiny_model: Path) -> None:
    """The file has its full size from the beginning: what is missing are zeros."""
    model = tmp_path / "model.gguf"
    model.symlink_to(tiny_model)
    command_line.resolve(ServerConfig(model=str(model)))
    (tmp_path / "model.gguf.aria2").touch()
    with pytest.raises(ConfigError, match=r"as model\.gguf\.aria2 beside it says: finish it with aria2c -c"):
        command_line.resolve(ServerConfig(model=str(model)))


def test_a_part_that_aria2_still_loads_is_told(tmp_path: Path, tiny_model: Path) -> None:
    """A split set is one model, whether its first file is named or its folder."""
    for part in (1, 2, 3):
        (tmp_path / f"model-0000{part}-of-00003.gguf").symlink_to(tiny_model)
    named = [tmp_path / "model-00001-of-00003.gguf", tmp_path]
    for model in named:
        command_line.resolve(ServerConfig(model=str(model)))
    (tmp_path / "model-00003-of-00003.gguf.aria2").touch()
    for model in named:
        with pytest.raises(ConfigError, match=r"as model-00003-of-00003\.gguf\.aria2 beside it says"):
            command_line.resolve(ServerConfig(model=str(model)))


def closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says of a folder that may not be entered, to root as well."""
    stat = os.stat

    def refused(path: str | os.PathLike[str] | int, *args: Any, **kwargs: Any) -> os.stat_result:
        if not isinstance(path, int) and folder in Path(path).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refused)


@pytest.mark.parametrize("command", [["--model"], ["plan", "--model"]])
def test_a_model_that_cannot_be_reached_is_told(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("moeserve.processes.logs.set_up_logging", lambda *args: None)
    (tmp_path / "alice").mkdir()
    (tmp_path / "alice" / "m.gguf").touch()
    closed(tmp_path / "alice", monkeypatch)
    for path, cause in (
        (tmp_path / "alice" / "m.gguf", f" by user {os.geteuid()}: Permission denied"),
        (tmp_path / ("x" * 300), ": File name too long"),
    ):
        with contextlib.suppress(SystemExit):
            assert cli.main([*command, str(path)]) == 2
        assert f"{path} cannot be reached{cause}" in caplog.text + capsys.readouterr().err


def test_a_model_that_may_not_be_read_is_told_with_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path != model)  # root may read it
    with pytest.raises(ConfigError, match=f"user {os.geteuid()} has no right to read .*; chmod it"):
        command_line.resolve(ServerConfig(model=str(model)))


def test_a_folder_of_closed_folders_holds_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "alice").mkdir()
    closed(tmp_path / "alice", monkeypatch)
    with pytest.raises(ConfigError, match=r"neither a \.gguf file nor a config\.json"):
        command_line.resolve(ServerConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("named", "hint"),
    [
        ("qwen3-30b-a3b.guf", "; did you mean {}/qwen3-30b-a3b.gguf?"),
        ("modles/qwen.gguf", "; did you mean {}/models?"),
        ("models", "; did you mean {}/models/qwen3?"),
        ("qwen3:30b", "; a model of the Hugging Face Hub is named as org/repo"),
        ("llama3", "; a model of the Hugging Face Hub is named as org/repo"),
        ("nothing-like-it.gguf", ""),
    ],
)
def test_a_model_that_is_not_there_gets_advice(tmp_path: Path, named: str, hint: str) -> None:
    (tmp_path / "models" / "qwen3").mkdir(parents=True)
    (tmp_path / "models" / "qwen3" / "config.json").touch()
    (tmp_path / "qwen3-30b-a3b.gguf").touch()
    with pytest.raises(ConfigError) as error:
        command_line.resolve(ServerConfig(model=str(tmp_path / named)))
    assert str(error.value).partition(";")[1] == hint[:1]
    assert hint.format(tmp_path) in str(error.value)


def test_a_lora_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match="it is a LoRA adapter: serve its base model"):
        command_line.resolve(ServerConfig(model=str(tmp_path)))


def test_a_folder_of_several_models_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(
        ConfigError, match=r"holds 2 models; name one of them: a-00001-of-00002\.gguf, b\.gguf"
    ):
        command_line.resolve(ServerConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("folder", "hint"),
    [
        (
            "hub",
            "; it is a cache of the Hub: moeserve list prints the names of its models, with HF_HUB_CACHE={}/hub",
        ),
        (
            "hub/models--acme--tiny-GGUF",
            "; a repository of the Hub's cache is named acme/tiny-GGUF, with HF_HUB_CACHE={}/hub",
        ),
        (
            "hub/models--acme--tiny-GGUF/snapshots",
            "; did you mean {}/hub/models--acme--tiny-GGUF/snapshots/abc?",
        ),
        ("studio", "; did you mean {}/studio/acme/tiny-GGUF?"),
        ("ollama", "; Ollama's models are files in it: ollama show --modelfile NAME"),
        ("ollama/blobs", "; Ollama's models are files in it: ollama show --modelfile NAME"),
    ],
)
def test_folders_of_other_programs(tmp_path: Path, folder: str, hint: str) -> None:
    """The Hub's cache, LM Studio's folder and Ollama's, as those programs lay them out."""
    for file in ("hub/models--acme--tiny-GGUF/snapshots/abc/t.gguf", "studio/acme/tiny-GGUF/t.gguf"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    ollama_folder(tmp_path / "ollama")
    with pytest.raises(ConfigError) as error:
        command_line.resolve(ServerConfig(model=str(tmp_path / folder)))
    assert hint.format(tmp_path) in str(error.value)


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
def test_a_model_of_ollama_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    blob, manifest = ollama_folder(tmp_path / "ollama")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"Ollama has a model of that name, which is the file {blob}"):
        command_line.resolve(ServerConfig(model=name))
    with pytest.raises(ConfigError, match="but a manifest of Ollama"):
        command_line.resolve(ServerConfig(model=str(manifest)))
    manifest.write_text('{"layers": [{"digest": 3}]}')
    with pytest.raises(ConfigError, match="a model of the Hugging Face Hub is named"):
        command_line.resolve(ServerConfig(model=name))


def ollama_folder(models: Path) -> tuple[Path, Path]:
    """Makes a folder as Ollama's, with one model, `tiny`. Returns the model's file and its manifest."""
    blob, manifest = models / "blobs/sha256-0123", models / "manifests/registry.ollama.ai/library/tiny/latest"
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:9999"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:0123"},
    ]
    for file in (blob, manifest):
        file.parent.mkdir(parents=True)
    blob.write_bytes(b"GGUF")
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob, manifest
