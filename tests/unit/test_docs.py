"""docs/serving.md lists exactly the flags there are, with their defaults, and the metrics there are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from moeserve.config import GROUPS, ServerConfig, env_name
from moeserve.httpserver.metrics import Metrics

REPOSITORY = Path(__file__).parents[2]
SERVING = (REPOSITORY / "docs" / "serving.md").read_text()


def flag_table(group: str) -> str:
    """The group's table as the documentation must have it."""
    lines = [f"| {group} | default | |", "|---|---|---|"]
    for option in dataclasses.fields(ServerConfig):
        if option.metadata["group"] == group:
            flag = "--" + option.name.replace("_", "-")
            default = "" if option.default in (None, "", ()) else f"`{option.default}`"
            lines.append(f"| `{flag}`<br>`{env_name(option.name)}` | {default} | {option.metadata['help']} |")
    return "\n".join(lines)


@pytest.mark.parametrize("group", GROUPS)
def test_flags_are_documented(group: str) -> None:
    assert flag_table(group) in SERVING, f"docs/serving.md must have:\n{flag_table(group)}"


def test_no_flag_is_documented_that_is_not_there() -> None:
    flags = {"--" + option.name.replace("_", "-") for option in dataclasses.fields(ServerConfig)}
    documented = set(re.findall(r"--[a-z][a-z-]+", SERVING))
    assert documented - flags == set()


def test_metrics_are_documented() -> None:
    exposition = Metrics("model").render()[0].decode()
    exposed = {name.removesuffix("_total") for name in re.findall(r"^# TYPE (\S+)", exposition, re.MULTILINE)}
    documented = {name.removesuffix("_total") for name in re.findall(r"moeserve:\w+", SERVING)}
    assert documented == exposed


def test_links_lead_somewhere() -> None:
    for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
