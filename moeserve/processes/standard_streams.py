"""Standard streams that whoever started this process has closed, as some supervisors do."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Opens /dev/null in the place of each. Without it the next file or socket would get its number, and what the
    process and its children print would be written there."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
