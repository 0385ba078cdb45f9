"""The page of machines has what `moeserve plan` predicts, and commands that the server takes."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeserve.cli.command_line import options_parser, read_options

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "reference" / "machines.md"


# The first without a GPU, the first with an expert cache, and the one with several GPUs; the nightly run has them all.
OF_EACH_KIND = (0, 4, 9)
OTHERS = [pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 3, 5, 6, 7, 8)]


@pytest.fixture(scope="module")
def gallery() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "scripts" / "machine_gallery.py"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("number", [*OF_EACH_KIND, *OTHERS])
def test_the_page_has_what_the_plan_says(gallery: dict[str, Any], models: Path, number: int) -> None:
    made = gallery["row"](gallery["MACHINES"][number], models)
    assert made in PAGE.read_text().splitlines(), "python scripts/machine_gallery.py writes it anew"


def test_the_page_is_the_scripts(gallery: dict[str, Any]) -> None:
    lines = PAGE.read_text().splitlines()
    rows = [
        next(line for line in lines if line.startswith(f"| {machine.name} | {machine.model} |"))
        for machine in gallery["MACHINES"]
    ]
    assert list(gallery["page"](rows)) == lines, "python scripts/machine_gallery.py writes it anew"


def test_a_faster_machine_gives_another_page(gallery: dict[str, Any], models: Path) -> None:
    machine = gallery["MACHINES"][1]
    faster = type(machine)(machine.name, machine.model, machine.ram, 2 * machine.ram_rate, machine.cpu_gops)
    model = gallery["write_model"](models, machine.model)
    slow, fast = (gallery["plan"](one, model)["speed"]["decode"]["1"] for one in (machine, faster))
    assert fast > 1.5 * slow


@pytest.mark.parametrize("number", [3, 4, 5, 7])
def test_more_answers_are_slower_only_where_they_find_fewer_experts(
    gallery: dict[str, Any], models: Path, number: int
) -> None:
    """With each of the models of which some experts are in RAM."""
    machine, rates = gallery["MACHINES"][number], []
    for name in ("GPT_OSS", "QWEN36", "GLM"):
        model = gallery["write_model"](models, gallery[name])
        found = gallery["plan"](replace(machine, ram=118), model)["speed"]
        for few, many in (("1", "4"), ("4", "16")):
            if many in found["hit_rates"] and found["decode"][many] < found["decode"][few]:
                assert found["hit_rates"][many] < found["hit_rates"][few] - 0.1
        rates.append(found["decode"])
    assert all(of["64"] > of["1"] for of in rates)


def test_the_commands_are_ones_that_the_server_takes() -> None:
    commands = re.findall(r"`moeserve (\S+\.gguf .*?)`", PAGE.read_text())
    assert len(commands) == 10
    for command in commands:
        given = options_parser("moeserve").parse_args(["--model", *command.split()])
        assert read_options(vars(given), {}).max_model_len == 32768
