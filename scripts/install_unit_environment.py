"""Installs what the unit tests need into this environment: pyproject.toml's dependencies but torch, and two extras.

moeserve itself is not installed: nothing is compiled, the tests import it from the checkout.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

LEFT_OUT = {"torch"}
EXTRAS = ("otel", "unit-test")
_NAME = re.compile(r"[\w.-]+")


def requirements(pyproject: Path) -> list[str]:
    project = tomllib.loads(pyproject.read_text())["project"]
    needed = list(project["dependencies"])
    for extra in EXTRAS:
        needed += project["optional-dependencies"][extra]
    return [requirement for requirement in needed if name_of(requirement) not in LEFT_OUT]


def name_of(requirement: str) -> str:
    match = _NAME.match(requirement)
    assert match is not None, requirement
    return match[0].lower()


if __name__ == "__main__":
    listed = requirements(Path(__file__).parents[1] / "pyproject.toml")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *listed], check=True)
