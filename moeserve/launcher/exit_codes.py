"""The server's exit codes; docs/reference/exit-codes.md has the table for users."""

from __future__ import annotations

from typing import Final

EXIT_STOPPED: Final = 0
EXIT_FAILED: Final = 1
# The same code as argparse and as a process with an unusable configuration (process.EXIT_USER_ERROR).
EXIT_USAGE: Final = 2
EXIT_ENGINE_LOST: Final = 3
