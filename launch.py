"""`python launch.py --model X`: the same as the `moeserve` command, from a checkout."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent


def run() -> int:
    if not any((CHECKOUT / "moeserve" / "kernels").glob("_C*.so")):
        # `pip install` puts the compiled extension with the installed package, and an editable one finds the rest
        # here by itself; this folder, first on the path, would hide it.
        with_checkout = list(sys.path)
        sys.path[:] = [entry for entry in sys.path if entry != str(CHECKOUT)]
        if (
            importlib.util.find_spec("moeserve") is None
        ):  # not installed: what needs no extension works from here
            sys.path[:] = with_checkout
    from moeserve.__main__ import run as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(run())
