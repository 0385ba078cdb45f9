"""Installs what the unit tests need into this environment: pyproject.toml's dependencies but torch, and two extras.

moeserve itself is not installed: nothing is compiled. A .pth file names the checkout instead of the working directory,
because moeserve starts its own processes with `python -P`, which does not look there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
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


def name_checkout(site_packages: Path, checkout: Path) -> None:
    """Makes the checkout's packages importable wherever site_packages is on the path."""
    (site_packages / "moeserve-checkout.pth").write_text(f"{checkout}\n")


if __name__ == "__main__":
    checkout = Path(__file__).resolve().parents[1]
    listed = requirements(checkout / "pyproject.toml")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *listed], check=True)
    name_checkout(Path(sysconfig.get_path("purelib")), checkout)
