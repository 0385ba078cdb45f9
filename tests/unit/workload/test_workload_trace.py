"""Trace files: what they mean, what is refused, and that a workload survives being written and read."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from moeserve.cli.workload.options import (
    add_judgement_options,
    add_workload_options,
    objectives_from,
    workload_from,
)
from moeserve.cli.workload.prompts import TokenHistory
from moeserve.cli.workload.shapes import PRESETS, WorkloadShape, generate
from moeserve.cli.workload.trace import TraceError, Workload, read_trace, write_trace
from moeserve.errors import ConfigError


def read(folder: Path, *lines: str) -> Workload:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return read_trace(path, seed=5)


def test_the_modules_example(tmp_path: Path) -> None:
    made = read(
        tmp_path,
        '{"arrival": 0.5, "prompt_len": 900, "output_len": 64}',
        '{"arrival": 0.7, "prompt": [1015, 2231, 877], "output_len": 64}',
        "",
        '{"arrival": 1.2, "prompt_len": 300, "output_len": 40, "prefix": "agent", "prefix_len": 200}',
        '{"arrival": 1.4, "prompt_len": 120, "output_len": 30, "conversation": "c7"}',
        '{"arrival": 1.1, "prompt_len": 500, "output_len": 40, "prefix": "agent", "prefix_len": 200}',
        '{"think": 8.0, "prompt_len": 250, "output_len": 30, "conversation": "c7"}',
    )
    assert [session.arrival for session in made.sessions] == [0.5, 0.7, 1.1, 1.2, 1.4]
    assert made.num_requests == 6
    assert TokenHistory(made, 1).prompt(0).tolist() == [1015, 2231, 877]
    agents = [TokenHistory(made, session).prompt(0) for session in (2, 3)]
    assert [len(prompt) for prompt in agents] == [500, 300]
    assert (agents[0][:200] == agents[1][:200]).all()
    assert agents[0][200] != agents[1][200]
    chat = TokenHistory(made, 4)
    first = chat.prompt(0)
    chat.answered(np.zeros(30, np.int32))
    second = chat.prompt(1)
    assert (len(first), len(second)) == (120, 250)
    assert (second[:150] == np.concatenate([first, np.zeros(30, np.int32)])).all()
    assert made.sessions[4].turns[1].think == 8.0


def test_a_conversations_prompts_may_be_given_too(tmp_path: Path) -> None:
    made = read(
        tmp_path,
        '{"prompt": [1, 2], "output_len": 1, "conversation": "a"}',
        '{"prompt": [9, 8, 7], "output_len": 2, "conversation": "a", "arrival": 3}',
        '{"prompt_len": 8, "output_len": 2, "conversation": "a"}',
    )
    history = TokenHistory(made, 0)
    assert history.prompt(0).tolist() == [1, 2]
    history.answered(np.array([5], np.int32))
    assert history.prompt(1).tolist() == [9, 8, 7]
    history.answered(np.array([5, 5], np.int32))
    third = history.prompt(2).tolist()
    assert (third[:5], len(third)) == ([9, 8, 7, 5, 5], 8)
    assert made.sessions[0].turns[1].not_before == 3.0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"output_len": 5}'], "either `prompt_len` or `prompt`"),
        (['{"prompt_len": 5, "prompt": [1], "output_len": 5}'], "either `prompt_len` or `prompt`"),
        (['{"prompt_len": 5}'], "missing required field `output_len`"),
        (['{"prompt_len": 0, "output_len": 5}'], ">= 1"),
        (['{"prompt_len": 5, "output_len": 5, "arrival": -1}'], ">= 0"),
        (['{"prompt_len": 5, "output_len": 5, "arival": 1}'], "unknown field `arival`"),
        (['{"prompt": [-1], "output_len": 5}'], ">= 0"),
        (['{"prompt": [], "output_len": 5}'], "length >= 1"),
        (['{"prompt_len": 5, "output_len": 5, "prefix": "a"}'], "come together"),
        (['{"prompt_len": 5, "output_len": 5, "prefix_len": 2}'], "come together"),
        (['{"prompt_len": 5, "output_len": 5, "prefix": "a", "prefix_len": 5}'], "must be less"),
        (['{"prompt": [1, 2], "output_len": 5, "prefix": "a", "prefix_len": 1}'], "first turn"),
        (['{"prompt_len": 5, "output_len": 5, "think": 1}'], "later turns"),
        (['{"prompt_len": 5, "output_len": 5, "conversation": "a"}'] * 2, "leaves nothing new"),
        (['{"prompt_len": 5, "output_len": 5}', "not json"], "malformed"),
        ([""], "no request"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=message) as error:
        read(tmp_path, *lines)
    if lines != [""]:
        assert f"line {len(lines)}:" in str(error.value)


@pytest.mark.parametrize("name", PRESETS)
def test_written_and_read_it_is_the_same(tmp_path: Path, name: str) -> None:
    shape = PRESETS[name]
    made = generate(
        WorkloadShape(**{f: getattr(shape, f) for f in shape.__slots__} | {"range_ratio": 0.5}),
        50,
        3.0,
        0.5,
        7,
    )
    write_trace(tmp_path / "t", made)
    again = read_trace(tmp_path / "t", seed=7)
    assert again == made
    for session in range(len(made.sessions)):
        assert (TokenHistory(made, session).prompt(0) == TokenHistory(again, session).prompt(0)).all()


# ---------------------------------------------------------------- options


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_workload_options(parser)
    add_judgement_options(parser)
    return parser.parse_args(arguments)


def test_options_are_a_workload() -> None:
    asked = "--dataset shared-prefix --num-prompts 30 --random-input-len 9 --num-prefixes 2 --request-rate 5 --seed 3"
    made = workload_from(options(*asked.split()))
    shape = WorkloadShape(input_len=9, prefix_len=256, num_prefixes=2)
    assert made == generate(shape, 30, 5.0, 1.0, 3)


def test_a_trace_comes_back_through_the_options(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    made = workload_from(options("--dataset", "multi-turn", "--num-prompts", "30", "--save-trace", path))
    assert workload_from(options("--trace", path)) == made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--trace x --num-prompts 5", "--num-prompts has no effect beside --trace"),
        ("--trace x --input-len 5", "--input-len has no effect beside --trace"),
        ("--num-prefixes 5", "--num-prefixes has no effect without --prefix-len"),
        ("--long-input-len 5", "--long-input-len has no effect without --long-every"),
        ("--think-time 5", "--think-time has no effect without --num-turns"),
        ("--burstiness 5", "--burstiness has no effect without --request-rate"),
        ("--save-detailed", "--save-detailed has no effect without --save-result"),
        ("--plot x.png", "must end in .svg"),
        ("--goodput ttft:fast", "--goodput"),
    ],
)
def test_options_without_effect_are_refused(arguments: str, message: str) -> None:
    args = options(*arguments.split())
    with pytest.raises(ConfigError, match=message):
        objectives_from(args), workload_from(args)


@pytest.mark.parametrize(
    "arguments",
    ["--num-prompts 0", "--input-len x", "--range-ratio 1", "--request-rate 0", "--request-rate nan", "--seed -1",
     "--dataset none", "--metric-percentiles 101", "--max-concurrency 0"],
)  # fmt: skip
def test_values_out_of_range_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(*arguments.split())
    assert arguments.split()[0] in capsys.readouterr().err
