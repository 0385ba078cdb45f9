"""The wheels are for no older system than those of what they need: pip would compile that there, or fail."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
GLIBC = re.compile(r"manylinux_2_(\d+)")
OLD_NAMES = {"manylinux1": 5, "manylinux2010": 12, "manylinux2014": 17}


def minor_of(platform: str) -> int:
    """Returns the x of the glibc 2.x that a platform's name asks for; 0 for any system."""
    if (match := GLIBC.match(platform)) is not None:
        return int(match[1])
    return next((minor for name, minor in OLD_NAMES.items() if platform.startswith(name)), 0)


def minor_needed(name: str) -> int:
    """Returns the same of the wheel by which a package was installed. It serves the systems of each of its tags."""
    text = importlib.metadata.distribution(name).read_text("WHEEL") or ""
    tags = re.findall(r"^Tag: \S+-(\S+)$", text, re.MULTILINE)
    return min((minor_of(platform) for tag in tags for platform in tag.split(".")), default=0)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_wheels_glibc_is_no_older_than_its_dependencies(machine: str) -> None:
    ours = minor_of(PROJECT["tool"]["cibuildwheel"][f"manylinux-{machine}-image"])
    names = [re.split(r"[^\w.-]", text)[0] for text in PROJECT["project"]["dependencies"]]
    needed: dict[str, int] = {}
    for name in names:
        try:
            needed[name] = minor_needed(name)
        except importlib.metadata.PackageNotFoundError:
            assert name == "torch"  # the one that unit tests do without
    assert max(needed.values()) > 0
    assert {name: minor for name, minor in needed.items() if minor > ours} == {}
