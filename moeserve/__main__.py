"""`python -m moeserve`: the same as the `moeserve` command."""

from __future__ import annotations

import sys

from moeserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
