"""The environment of the unit tests: what imports moeserve there where the working directory is not looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.install_unit_environment import name_checkout


def test_the_checkout_is_found_without_the_working_directory(tmp_path: Path) -> None:
    checkout, site_packages = tmp_path / "checkout", tmp_path / "site-packages"
    for folder in (checkout / "of_the_checkout", site_packages):
        folder.mkdir(parents=True)
    (checkout / "of_the_checkout" / "__init__.py").touch()
    name_checkout(site_packages, checkout)
    program = f"import site; site.addsitedir({str(site_packages)!r}); import of_the_checkout"
    subprocess.run([sys.executable, "-P", "-c", program], check=True, cwd=tmp_path, timeout=60)
