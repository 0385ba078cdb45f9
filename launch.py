"""`python launch.py --model X`: the same as the `moeserve` command, from a checkout."""

from __future__ import annotations

import sys

from moeserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
