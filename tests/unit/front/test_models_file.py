"""Several models from the command line and from --models-file."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from moeserve.cli import main as cli
from moeserve.cli.command_line import demonstration_model, resolve
from moeserve.cli.several_models import (
    OF_FRONT,
    OF_ONE_MODEL,
    check_single,
    several_models,
    wants_several,
)
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.front.config import FrontConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abc":
        shutil.copy(demonstration_model(), tmp_path / f"{name}.gguf")
    return tmp_path


def front(*arguments: str, env: dict[str, str] | None = None) -> FrontConfig:
    named, given = cli.given_options(cli.serve_parser(), arguments)
    assert wants_several(named, given, env or {})
    return several_models(named, given, env or {})


def test_models_of_the_command_line_share_its_flags(folder: Path) -> None:
    found = front(str(folder / "a.gguf"), str(folder / "b.gguf"), "--port", "9", "--max-model-len", "128")
    assert [model.name for model in found.models] == ["a", "b"]
    assert found.common.port == 9
    for model in found.models:
        assert model.config.max_model_len == 128
        assert model.config.port == ServerConfig().port, "it listens where the front says"
        assert not model.is_pinned


def test_each_model_of_the_file_has_flags_of_its_own(folder: Path) -> None:
    (folder / "models.yaml").write_text(f"""
- model: {folder}/a.gguf
  served-model-name: small,tiny
  max_model_len: 64
  pin: true
- model: {folder}/b.gguf
  lora-modules: []
""")
    found = front(
        *("--models-file", str(folder / "models.yaml"), "--max-model-len", "128", "--api-key", "k"),
        *("--kv-disk", str(folder / "kv"), "--host", "0.0.0.0", "--allowed-origin", "https://a.example"),
    )
    a, b = found.models
    assert (a.names, a.is_pinned, a.config.max_model_len) == (("small", "tiny"), True, 64)
    assert (b.name, b.is_pinned, b.config.max_model_len) == ("b", False, 128)
    assert {a.config.kv_disk, b.config.kv_disk} == {f"{folder}/kv/small", f"{folder}/kv/b"}
    for model in found.models:
        assert model.config.api_key == ("k",), "its server knows whose request it is"
        assert model.config.prefix_cache == "per-key"
        assert model.config.allowed_origin == (), "the front has seen to it"
        assert model.config.host == "0.0.0.0", "by which a server decides whom to trust"


def test_models_have_gpus_of_their_own(folder: Path) -> None:
    entries = [{"model": f"{folder}/a.gguf", "gpus": 2}, {"model": f"{folder}/b.gguf", "gpus": "3"}]
    (folder / "models.json").write_text(json.dumps([*entries, {"model": f"{folder}/c.gguf"}]))
    found = front("--models-file", str(folder / "models.json"), "--gpus", "0,2")
    assert [model.config.gpus for model in found.models] == ["2", "3", "0,2"]


def test_a_list_in_json_does_as_well_and_adds_to_the_command_lines(folder: Path) -> None:
    (folder / "models.json").write_text(json.dumps([{"model": f"{folder}/c.gguf"}]))
    found = front(str(folder / "a.gguf"), "--models-file", str(folder / "models.json"))
    assert [model.name for model in found.models] == ["a", "c"]


def test_batches_are_the_fronts(folder: Path) -> None:
    found = front(str(folder / "a.gguf"), str(folder / "b.gguf"), "--batch-dir", str(folder / "batches"))
    assert found.common.batch_dir == str(folder / "batches")
    assert [model.config.batch_dir for model in found.models] == [None, None], "one process has the folder"


def test_written_and_read_again(folder: Path) -> None:
    found = front(*(str(folder / f"{name}.gguf") for name in ("a", "b", "missing")), "--models-memory", "3")
    found.write(folder)
    assert FrontConfig.read(folder) == found
    assert (folder / "models.json").stat().st_mode & 0o777 == 0o600


LATER = {
    "its file": ("late.gguf", {}),
    "its folder": ("late", {}),
    "a model of the hub": ("acme/late-GGUF:Q4_K_M", {}),
    "its projector": ("b.gguf", {"mmproj": "late.gguf"}),
    "the projector beside it": ("b.gguf", {"mmproj": "auto"}),
    "an adapter": ("b.gguf", {"lora-modules": "tuned=late.gguf"}),
    "the folder of adapters": ("b.gguf", {"lora-dir": "late"}),
    "a model that drafts": ("b.gguf", {"speculative-model": "late.gguf"}),
    "no GGUF file yet": ("begun.gguf", {}),
}


@pytest.mark.parametrize("what", LATER)
def test_one_whose_files_are_missing_keeps_no_other_from_being_served(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(folder)
    (folder / "begun.gguf").write_text("<!DOCTYPE html>")
    (folder / "empty").mkdir()
    model, options = LATER[what]
    (folder / "models.json").write_text(json.dumps([{"model": "a.gguf"}, {"model": model, **options}]))
    a, late = front("--models-file", "models.json", "--kv-disk", "kv").models
    assert (a.is_resolved, late.is_resolved) == (True, False)
    assert "model 2" in caplog.text
    assert "model 1" not in caplog.text
    if what == "a model of the hub":
        assert late.name == late.config.model == model
        return
    # The front looks for them in another folder.
    assert late.name == Path(model).stem
    assert late.config.kv_disk == str(folder / "kv" / late.name)
    shutil.rmtree(folder / "empty")
    (folder / "begun.gguf").unlink()
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError):
        resolve(late.config)
    monkeypatch.chdir(folder)
    wanted = folder / ("begun.gguf" if what == "no GGUF file yet" else "late.gguf")
    if what in ("its folder", "the folder of adapters"):
        (folder / "late").mkdir()
        wanted = folder / "late" / "z.gguf"
    if what == "the projector beside it":
        wanted = folder / "mmproj-late.gguf"
    shutil.copy(demonstration_model(), wanted)
    fresh = front("--models-file", "models.json", "--kv-disk", "kv").models[1].config
    monkeypatch.chdir("/")
    # A folder's model is called by the file in it, and this one keeps the name that it has been listed with.
    fresh = dataclasses.replace(fresh, served_model_name=late.name, kv_disk=late.config.kv_disk)
    assert resolve(late.config) == fresh


def test_a_list_of_which_no_model_is_there_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        front(str(folder / "x.gguf"), str(folder / "y.gguf"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: a.gguf", "must be a list with a mapping for each model"),
        ("[]", "must be a list with a mapping for each model"),
        ("- a.gguf", "model 1 of"),
        ("- {model: FOLDER/a.gguf}\n- {model: FOLDER/a.gguf}", "2 models are called a"),
        ("- {model: FOLDER/a.gguf, max-modell-len: 3}", "max-modell-len: there is no such option"),
        ("- {model: FOLDER/a.gguf, max-model-len: 3}", "--max-model-len: must be between"),
        ("- {model: FOLDER/a.gguf, port: 3}", "port: is for the whole server"),
        ("- {model: FOLDER/a.gguf, pin: 1}", "pin: must be true or false"),
        ("- {model: FOLDER/a.gguf, threads: true}", "threads: must be a text or a number"),
        ("- {model: FOLDER/none.gguf}", "model 1 (FOLDER/none.gguf): --model or MOESERVE_MODEL: there is no"),
        ("- {model: FOLDER/a.gguf, model: FOLDER/b.gguf}", "a key is given twice"),
        ("- {model: *x}", "; correct the file"),
        ("- !!python/object/apply:os.system ['true']", "cannot be read"),
    ],
)
def test_a_bad_file_is_refused_in_words_that_name_the_place(folder: Path, text: str, says: str) -> None:
    path = folder / "models.yaml"
    path.write_text(text.replace("FOLDER", str(folder)))
    with pytest.raises(ConfigError) as refused:
        front("--models-file", str(path))
    assert says.replace("FOLDER", str(folder)) in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--served-model-name", "x"], "--served-model-name: is for one model"),
        (["--mmproj", "auto"], "--mmproj: is for one model"),
        (["--worker", "gpu-host:9000"], "--worker: is for one model"),
        (["--model", "c.gguf"], "--model names one model"),
        (["--models-file", "/nowhere.yaml"], "cannot be read: .*; correct the path or its rights"),
    ],
)
def test_flags_of_one_model_are_refused_for_all(folder: Path, flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        front(str(folder / "a.gguf"), str(folder / "b.gguf"), *flags)


def test_flags_for_several_models_are_refused_for_one() -> None:
    for flag in ("models_memory", "model_idle_timeout", "model_load_timeout"):
        with pytest.raises(ConfigError, match="is for several models"):
            check_single(dataclasses.replace(ServerConfig(), **{flag: 5.0}))  # type: ignore[arg-type]


def test_one_model_is_served_as_ever(folder: Path) -> None:
    named, given = cli.given_options(cli.serve_parser(), [str(folder / "a.gguf"), "--port", "1"])
    assert not wants_several(named, given, {})
    assert given["model"] == str(folder / "a.gguf")


def test_the_lists_of_options_are_of_options() -> None:
    names = set(ServerConfig.__dataclass_fields__)
    assert names >= OF_FRONT | OF_ONE_MODEL
    assert not OF_FRONT & OF_ONE_MODEL
