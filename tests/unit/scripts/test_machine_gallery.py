"""The page of machines has what `moeserve plan` predicts, and commands that the server takes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from moeserve.cli.command_line import options_parser, read_options

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "reference" / "machines.md"


@pytest.fixture(scope="module")
def gallery() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "scripts" / "machine_gallery.py"))


def test_the_page_is_what_the_plan_says(gallery: dict[str, Any]) -> None:
    made = "\n".join(gallery["page"]()) + "\n"
    assert made == PAGE.read_text(), "python scripts/machine_gallery.py writes it anew"


def test_a_faster_machine_gives_another_page(gallery: dict[str, Any], tmp_path: Path) -> None:
    machine = gallery["MACHINES"][1]
    faster = type(machine)(machine.name, machine.model, machine.ram, 2 * machine.ram_rate, machine.cpu_gops)
    model = gallery["write_model"](tmp_path, machine.model)
    slow, fast = (gallery["plan"](one, model)["speed"]["decode"]["1"] for one in (machine, faster))
    assert fast > 1.5 * slow


def test_the_commands_are_ones_that_the_server_takes() -> None:
    commands = re.findall(r"`moeserve (\S+\.gguf .*?)`", PAGE.read_text())
    assert len(commands) == 10
    for command in commands:
        given = options_parser("moeserve").parse_args(["--model", *command.split()])
        assert read_options(vars(given), {}).max_model_len == 32768
