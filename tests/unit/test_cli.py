"""Flags and environment variables to ServerConfig; a wrong value is refused in words that name its source."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.abc
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moeserve.__main__ import run
from moeserve.cli import command_line
from moeserve.cli import main as cli
from moeserve.config import GROUPS, ServerConfig, env_name
from moeserve.config.option import option as declare_option
from moeserve.errors import ConfigError
from moeserve.processes.cpus import pool_threads

REPOSITORY = Path(__file__).resolve().parents[2]


def parse(*arguments: str, env: Mapping[str, str] | None = None) -> ServerConfig:
    return cli.parse(cli.serve_parser(), arguments, env or {})


def test_defaults_are_the_configs() -> None:
    assert parse() == ServerConfig()


@pytest.mark.parametrize("arguments", [[], ["model.gguf"], ["plan", "--model", "model.gguf"]])
def test_a_deleted_working_directory_is_named(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a traceback, or in a library's word that it cannot be loaded."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert cli.main(arguments) == 2
    assert "the working directory has been deleted; start from another" in capsys.readouterr().err


def test_a_variable_that_is_unset_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`moeserve "$MODEL"`."""
    with pytest.raises(SystemExit):
        cli.main([""])
    assert "the first word is empty; name a model or a command" in capsys.readouterr().err


def test_a_key_and_its_certificate_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cert.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    for flag, file, missing in (
        ("--ssl-keyfile", "key.pem", "--ssl-keyfile: needs --ssl-certfile"),
        ("--ssl-certfile", "cert.pem", "--ssl-certfile: needs --ssl-keyfile"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["serve", flag, str(tmp_path / file)])
        assert ended.value.code == 2
        assert missing in capsys.readouterr().err


def test_each_option_is_a_flag_and_an_environment_variable_of_the_right_type() -> None:
    parser = cli.serve_parser()
    for option in dataclasses.fields(ServerConfig):
        high = option.metadata["high"] or 77
        text = (option.metadata["choices"] or ("77" if high >= 77 else "7" if high >= 7 else "0.5",))[-1]
        by_flag = getattr(cli.parse(parser, [command_line.flag_name(option.name), text], {}), option.name)
        by_variable = getattr(cli.parse(parser, [], {env_name(option.name): text}), option.name)
        assert by_flag == by_variable
        assert by_flag in (text, 77, 7, 0.5, (text,))
        assert isinstance(by_flag, (type(option.default), int, float, str))


def test_flag_wins_over_environment_wins_over_default() -> None:
    env = {"MOESERVE_PORT": "9000", "MOESERVE_HOST": ""}
    assert parse(env=env).port == 9000
    assert parse("--port", "9001", env=env).port == 9001
    assert parse(env=env).host == "127.0.0.1", "an empty variable counts as unset"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("port", "65536", "must be between 0 and 65535, not 65536"),
        ("port", "http", "must be a whole number, not 'http'"),
        ("port", "80.5", "must be a whole number, not '80.5'"),
        ("max_num_seqs", "0", "must be between 1 and 4096, not 0"),
        ("max_model_len", "15", "must be between 16 and"),
        ("shutdown_timeout", "nan", "must be between 0 and 86400, not nan"),
        ("shutdown_timeout", "inf", "must be between"),
        ("shutdown_timeout", "5m", "must be a number of seconds without a unit, not '5m'"),
        ("kv_ram", "16GB", "must be a number of GiB without a unit, not '16GB'"),
        ("prefill_share", "90%", "must be a number such as 0.5, not '90%'"),
        ("threads", "-1", "must be between 1 and 1024"),
        ("log_level", "loud", "must be one of debug, info, warning, error, not 'loud'"),
    ],
)
def test_bad_value_is_refused_and_its_source_named(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as by_flag:
        parse(f"{command_line.flag_name(name)}={text}")
    with pytest.raises(ConfigError) as by_variable:
        parse(env={env_name(name): text})
    assert message in str(by_flag.value)
    assert str(by_flag.value).startswith(f"{command_line.flag_name(name)}: ")
    assert str(by_variable.value).startswith(f"environment variable {env_name(name)}: ")


def test_empty_api_key_does_not_open_the_server() -> None:
    with pytest.raises(ConfigError, match="--api-key: must not be empty"):
        parse("--api-key", "")


def test_help_groups_every_option_with_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for group in GROUPS:
        assert f"\n{group}:\n" in text
    words = " ".join(text.split())
    for option in dataclasses.fields(ServerConfig):
        assert f"{command_line.flag_name(option.name)} " in words
        assert env_name(option.name) in words
        if option.default not in (None, "", ()):
            assert f"default: {option.default}, {env_name(option.name)}" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prot", "1"], "unrecognized arguments: --prot 1; did you mean --port?"),
        (["--max-num", "3"], "unrecognized arguments: --max-num 3"),
        (["--max-model-length", "3"], "; did you mean --max-model-len?"),
        (["--ctx-sizes", "3"], "; did you mean --max-model-len?"),
        (
            ["a.gguf", "--n-cpu-moe", "30"],
            "; --n-cpu-moe: experts are placed automatically; --num-gpu-experts N",
        ),
        (
            ["a.gguf", "--gpu-memory-utilization=0.9"],
            "; --gpu-memory-utilization: use --gpu-memory-budget GIB",
        ),
        (
            ["a.gguf", "--max-deferred-experts-per-token", "1"],
            "; --max-deferred-experts-per-token: it was removed",
        ),
        (["serve", "a.gguf", "serve"], "unrecognized arguments: serve"),
        (["serve", "a.gguf", "--model", "b.gguf"], "two models are named, a.gguf and --model b.gguf"),
        (
            ["srve"],
            "there is no command 'srve', only serve, doctor, run, launch, pull, list, show, rm, worker, reload, plan, "
            "bench, simulate, cache, compare-dumps, completion; a model is named by --model; did you mean serve?",
        ),
    ],
)
def test_unknown_words_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_variables_that_only_look_like_ours_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moeserve.launcher.launch.launch", lambda config: 0)
    monkeypatch.setattr("moeserve.processes.logs.set_up_logging", lambda *args: None)
    monkeypatch.setenv("MOESERVE_PROT", "9000")
    monkeypatch.setenv("MOESERVE_PORT", "9000")
    assert cli.main([]) == 0
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "MOESERVE_PROT" in warning
    assert "MOESERVE_PORT" not in warning


@pytest.mark.parametrize(
    "command", [["plan"], ["bench", "engine"], ["bench", "steps"], ["simulate"]], ids=" ".join
)
def test_other_commands_explain_the_servers_options_as_it_does(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    (explained,) = (one for one in dataclasses.fields(ServerConfig) if one.name == "max_num_batched_tokens")
    assert f"--max-num-batched-tokens N {explained.metadata['help'][:50]}" in words
    assert "[MOESERVE_MAX_NUM_BATCHED_TOKENS]" in words


def test_serve_may_be_named_or_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched: list[ServerConfig] = []

    def launch(config: ServerConfig) -> int:
        launched.append(config)
        return 7

    monkeypatch.setattr("moeserve.launcher.launch.launch", launch)
    monkeypatch.setattr("moeserve.processes.logs.set_up_logging", lambda *args: None)
    caplog.set_level("INFO")
    for arguments in (["serve", "--port", "1"], ["--port", "1"]):
        assert cli.main(arguments) == 7
        assert "no --model was given" in caplog.text
        caplog.clear()
    assert launched[0] == launched[1]
    assert launched[0].port == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "engine", "--batch", "1,x"], "--batch: must be a whole number, not 'x'"),
        (["bench", "engine", "--gen", "0"], "--gen: must be between 1 and 1048576, not 0"),
        (["plan", "--ram", "16GB"], "--ram: must be a number without a unit, not '16GB'"),
    ],
)
def test_a_value_that_cannot_be_read_is_named_in_words(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------- what depends on the machine


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
        (tmp_path / "alice" / "m.gguf", "Permission denied"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with contextlib.suppress(SystemExit):
            assert cli.main([*command, str(path)]) == 2
        assert f"{path} cannot be reached: {cause}" in caplog.text + capsys.readouterr().err


def test_a_folder_of_closed_folders_holds_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "alice").mkdir()
    closed(tmp_path / "alice", monkeypatch)
    with pytest.raises(ConfigError, match=r"neither a \.gguf file nor a config\.json"):
        command_line.resolve(ServerConfig(model=str(tmp_path)))


def test_a_model_may_stand_behind_serve(tmp_path: Path) -> None:
    assert parse("m.gguf", "--port", "1").model == "m.gguf"
    assert parse("m.gguf", "--model", "m.gguf").model == "m.gguf"
    assert parse("--model", "m.gguf", env={"MOESERVE_MODEL": "other.gguf"}).model == "m.gguf"


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


# ---------------------------------------------------------------- the real commands


@pytest.mark.parametrize("command", [["launch.py"], ["-m", "moeserve"], ["-m", "moeserve", "serve"]])
def test_three_ways_to_the_same_command(command: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, *command, "--model", "/no/such.gguf"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2
    assert "--model or MOESERVE_MODEL: there is no /no/such.gguf" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_python_without_our_packages_is_told_so_in_a_line() -> None:
    """`python3 launch.py` outside of the environment that `make serve` has made."""
    program = "import sys; sys.modules['msgspec'] = None; from moeserve.__main__ import run; sys.exit(run())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"moeserve: {sys.executable} (Python ")
    assert "does not have msgspec, which moeserve needs" in said


def test_an_old_python_is_told_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    assert run() == 2
    assert "is too old: 3.11 is needed at least" in capsys.readouterr().err
    assert (
        tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["requires-python"] == ">=3.11"
    )


@pytest.mark.parametrize("command", [["list"], ["completion", "bash"]])
def test_a_closed_pipe_and_a_full_disk_leave_no_traceback(command: list[str], tmp_path: Path) -> None:
    """`moeserve list | head -1`, and `moeserve list > file` where there is no room."""
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for output, code, says in (
        (writer, 141, ""),
        (full, 1, "the output could not be written: No space left"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "moeserve", *command],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | {"HF_HUB_CACHE": str(tmp_path)},
        )
        os.close(output)
        assert done.returncode == code
        assert done.stderr.startswith(f"moeserve: {says}") if says else done.stderr == ""


class InterruptedImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name == "moeserve.cli.main":
            raise KeyboardInterrupt


def test_ctrl_c_leaves_no_traceback_even_while_modules_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["moeserve", "plan"])
    monkeypatch.setitem(cli.COMMANDS, "plan", cli.Command(interrupted, ""))
    assert run() == 130
    monkeypatch.delitem(sys.modules, "moeserve.cli.main")
    monkeypatch.setattr(sys, "meta_path", [InterruptedImport(), *sys.meta_path])
    assert run() == 130


@pytest.mark.parametrize(
    ("flags", "resolved"),
    [
        ((), "shared"),
        (("--api-key", "secret"), "per-key"),
        (("--api-key-file", "keys"), "per-key"),
        (("--api-key", "secret", "--prefix-cache", "shared"), "shared"),
        (("--prefix-cache", "off"), "off"),
    ],
)
def test_keys_have_prefix_caches_of_their_own(flags: tuple[str, ...], resolved: str) -> None:
    assert command_line.resolve(parse(*flags)).prefix_cache == resolved


def test_a_flag_in_an_unknown_group_is_refused_where_it_is_declared() -> None:
    """It would be missing from flags.md."""
    with pytest.raises(ValueError, match="no group of flags 'Batch'"):
        declare_option(1, "Batch", "a flag")
