"""What users of other servers type is understood, or answered with the flag of ours."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from moeserve.cli import command_line
from moeserve.cli import main as cli
from moeserve.cli.flag_advice import ADVICE
from moeserve.cli.other_flags import UNDERSTOOD, VALUES, in_our_words
from moeserve.config import ServerConfig

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        (["models/a.gguf"], {"model": "models/a.gguf"}),
        (["a.gguf", "-c", "8192"], {"model": "a.gguf", "max_model_len": 8192}),
        (["-m", "a.gguf", "--ctx-size=0", "-ngl", "99"], {"model": "a.gguf"}),
        (["-hf", "org/repo:Q4_K_M", "-ngl", "12"], {"model": "org/repo:Q4_K_M", "n_gpu_layers": 12}),
        (["--model-path", "a.gguf", "--gpu-layers=0"], {"model": "a.gguf", "device": "cpu"}),
        (["--n-gpu-layers", "99"], {}),
        (["--n-gpu-layers", "7"], {"n_gpu_layers": 7}),
        (["--parallel", "4", "--seed", "-1", "-s", "7"], {"max_num_seqs": 4, "seed": 7}),
        (["--parallel=layers", "--threads", "-1"], {"parallel": "layers"}),
        (["--max_model_len", "8k", "--max-total-tokens=1.5K"], {"max_model_len": 8000, "max_total_tokens": 1536}),
        (["--max-model-len", "auto", "--log-level", "warn"], {"log_level": "warning"}),
        (["--tool-call-parser", "qwen25"], {"tool_call_parser": "hermes"}),
        (["--tool-call-parser", "openai", "--reasoning-parser", "glm45"], {"reasoning_parser": "qwen3"}),
        (["--tool-call-parser", "step3", "--reasoning-parser=granite"], {}),
        (["--reasoning-parser", "openai_gptoss"], {"reasoning_parser": "harmony"}),
        (["--kv-cache-dtype", "float16", "--device=none"], {"kv_cache_dtype": "f16", "device": "cpu"}),
        (["--generation-config=vllm", "--max-queued-requests", "9"], {"max_num_queued_reqs": 9}),
        (["--tensor-parallel-size", "2", "-np", "4", "-t", "3"], {"gpus": "2", "max_num_seqs": 4, "threads": 3}),
    ],
)  # fmt: skip
def test_what_users_of_other_servers_type(arguments: list[str], config: dict[str, object]) -> None:
    words, notes = in_our_words(arguments)
    assert cli.parse(cli.serve_parser(), words, {}) == ServerConfig(**config)  # type: ignore[arg-type]
    assert all(": taken as " in note for note in notes)


@pytest.mark.parametrize(
    "flag", [name for name in VALUES if name not in ("--seed", "--threads", "--max-model-len")]
)
def test_values_of_other_servers_become_ours(flag: str) -> None:
    for value, ours in VALUES[flag].items():
        words, _ = in_our_words([flag, value])
        assert words == [flag, ours]
        cli.parse(cli.serve_parser(), words, {})


def test_a_command_line_of_llama_cpp_is_answered_flag_by_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """ "--temp" was answered with --gpus, the nearest name that was known."""
    with pytest.raises(SystemExit):
        cli.main(["serve", "--temp", "0.7", "-fa", "on", "--cache_ram", "4096", "-sm", "layer"])
    said = capsys.readouterr().err
    assert "--temp: use --override-generation-config '{\"temperature\": VALUE}'" in said
    assert "-fa: leave it out" in said
    assert "--cache-ram: use --kv-ram GIB, in GiB instead of MiB" in said
    assert "-sm: use --gpus" in said
    assert "did you mean" not in said


@pytest.mark.parametrize("command", [[], ["serve"]])
def test_a_model_needs_no_flag(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerConfig] = []

    def launch(config: ServerConfig) -> int:
        served.append(config)
        return 0

    monkeypatch.setattr("moeserve.launcher.launch.launch", launch)
    monkeypatch.setattr("moeserve.processes.logs.set_up_logging", lambda *args: None)
    assert cli.main([*command, str(command_line.demonstration_model()), "-c", "512"]) == 0
    assert served[0].max_model_len == 512


def test_the_page_for_users_of_other_servers_has_every_flag() -> None:
    """And no other: what it says of a flag is the code's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(REPOSITORY / "scripts")
        from coming_from_reference import PROGRAMS, flag_here
    listed = {flag for program in PROGRAMS for flag in program.flags}
    assert listed == UNDERSTOOD.keys() | ADVICE.keys()
    page = (REPOSITORY / "docs" / "reference" / "coming-from.md").read_text()
    for flag in listed:
        assert re.search(rf"^\| .*`{flag}`.* \| {re.escape(flag_here(flag))} \|$", page, re.M), flag


def test_flags_of_the_page_for_users_of_other_servers_are_ours() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(REPOSITORY / "scripts")
        from coming_from_reference import PROGRAMS
    ours = {command_line.flag_name(option.name) for option in dataclasses.fields(ServerConfig)}
    told = [
        text for program in PROGRAMS for text in (*program.commands.values(), *program.variables.values())
    ]
    named = {flag for text in [*told, *ADVICE.values()] for flag in re.findall(r"--[a-z][a-z-]+", text)}
    assert named - ours == {"--url", "--no-history"}, "which are of `moeserve run`"
    commands = {command for text in told for command in re.findall(r"moeserve ([a-z]+)(?=[ `])", text)}
    assert commands <= cli.COMMANDS.keys()


def test_every_flag_that_is_understood_is_one_of_ours() -> None:
    ours = {command_line.flag_name(option.name) for option in dataclasses.fields(ServerConfig)}
    assert set(UNDERSTOOD.values()) <= ours
    assert not (UNDERSTOOD.keys() | ADVICE.keys()) & ours
    assert not UNDERSTOOD.keys() & ADVICE.keys()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--served-model-name a b", "b; --served-model-name takes one value: the model has one name"),
        ("--api-key a b", "b; --api-key takes one value: repeat the flag for more"),
        ("--allowed-origin=a b", "b; --allowed-origin takes one value: repeat the flag for more"),
        ("--port 80 90", "90; --port takes one value"),
    ],
)
def test_a_value_too_many_is_said_with_its_flag(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", *arguments.split()])
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {said}\n")
