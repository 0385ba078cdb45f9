"""Installs what `pip install --no-build-isolation` needs to find in this environment: [build-system] of
pyproject.toml, then what scikit-build-core asks for beside it (cmake and ninja, where the machine has none or
an old one)."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path


def install(requirements: list[str]) -> None:
    if requirements:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *requirements], check=True)


os.chdir(Path(__file__).parents[1])
install(tomllib.loads(Path("pyproject.toml").read_text())["build-system"]["requires"])

from scikit_build_core.build import get_requires_for_build_editable  # noqa: E402  (installed just now)

install(get_requires_for_build_editable({}))
