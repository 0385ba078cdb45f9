"""Flags and environment variables to ServerConfig; a wrong value is refused in words that name its source."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from moeserve.cli import command_line
from moeserve.cli import main as cli
from moeserve.cli.several_models import several_models
from moeserve.cli.unicode_values import check_unicode
from moeserve.config import GROUPS, ServerConfig, env_name
from moeserve.config.option import option as declare_option
from moeserve.errors import ConfigError
from moeserve.processes.cpu_baseline import missing_instructions

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


KVM64 = "processor\t: 0\nflags\t\t: fpu sse sse2 ht syscall nx lm pni cx16 hypervisor\nbugs\t\t:\n"


def test_a_cpu_that_the_libraries_do_not_run_on_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A virtual machine of the type kvm64: NumPy's import would end the process with SIGILL."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(KVM64)
    lacking = missing_instructions(cpuinfo, "x86_64")
    assert lacking == ["popcnt", "ssse3", "sse4_1", "sse4_2"]
    assert missing_instructions(cpuinfo, "aarch64") == []
    assert missing_instructions(tmp_path / "none", "x86_64") == []
    monkeypatch.setattr(cli, "missing_instructions", lambda: lacking)
    assert cli.main(["doctor"]) == 2
    assert "this CPU has no popcnt, ssse3, sse4_1, sse4_2, for which NumPy" in capsys.readouterr().err


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


def test_a_file_name_in_another_encoding_is_told(tmp_path: Path) -> None:
    """It ended in a traceback."""
    name = os.fsdecode(os.fsencode(tmp_path) + b"/mod\xe8le.gguf")
    demonstration = str(command_line.demonstration_model())
    Path(name).symlink_to(demonstration)
    message = r"--model: '.*/mod\\udce8le\.gguf' has bytes that are not utf-8; rename the file or folder$"
    with pytest.raises(ConfigError, match=message):
        check_unicode(command_line.resolve(parse(name)))
    with pytest.raises(ConfigError, match=message):
        several_models([demonstration, name], {}, {})
    check_unicode(command_line.resolve(parse(demonstration, "--served-model-name", "modèle 😀")))


def test_empty_api_key_does_not_open_the_server() -> None:
    with pytest.raises(ConfigError, match="--api-key: must not be empty"):
        parse("--api-key", "")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["help"], "usage: moeserve [command] [MODEL ...] [options]"),
        (["help", "list"], "usage: moeserve list"),
        (["help", "help"], "usage: moeserve [command] [MODEL ...] [options]"),
        (["help", "bench", "engine"], "usage: moeserve bench engine"),
        (["help", "--help"], "usage: moeserve [command] [MODEL ...] [options]"),
        (["help", "-h", "list"], "usage: moeserve list"),
        # What follows the dashes is the agent's: it and a server were started.
        (["help", "launch", "claude", "--", "x"], "usage: moeserve launch"),
        (["version"], "moeserve "),
    ],
)
def test_help_and_version_need_no_dashes(
    words: list[str],
    shown: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / words[0]).touch()  # a file of that name is no model
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(shown)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["help", "nothing"], "there is no command 'nothing'"),
        (["help", "bench", "nothing"], "usage: moeserve bench"),
        (["version", "x"], "unrecognized arguments: x"),
    ],
)
def test_help_for_what_there_is_not_is_an_error(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts took the exit code 0 for a sign that the command is there."""
    try:
        code: object = cli.main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert said in capsys.readouterr().err


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
        else:
            assert "default: " in option.metadata["help"], option.name


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
    model = command_line.demonstration_model()
    assert cli.main([str(model)]) == 7
    assert "no --model was given" not in caplog.text, "it was given by its path"
    monkeypatch.setattr(cli, "slow_file_system", lambda path: f"a network drive, {path.name}")
    assert cli.main([str(model)]) == 7
    assert f"the model is on a network drive, {model.name}: if loading" in caplog.text


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


def test_a_model_may_stand_behind_serve(tmp_path: Path) -> None:
    assert parse("m.gguf", "--port", "1").model == "m.gguf"
    assert parse("m.gguf", "--model", "m.gguf").model == "m.gguf"
    assert parse("--model", "m.gguf", env={"MOESERVE_MODEL": "other.gguf"}).model == "m.gguf"


# ---------------------------------------------------------------- the real commands


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


def test_a_number_that_may_be_a_word_has_a_name_of_its_own() -> None:
    cases: list[tuple[dict[str, Any], str]] = [({}, "{SECONDS,auto}"), ({"metavar": "GIB"}, "{GIB,auto}")]
    for given, name in cases:
        field = declare_option(None, GROUPS[0], "", choices=("auto",), **given)
        field.name = "memory"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command_line, "_hints", lambda: {"memory": float | Literal["auto"] | None})
            assert command_line.value_name(field) == name
