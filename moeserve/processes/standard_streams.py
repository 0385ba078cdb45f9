"""Opens standard streams that the process was started without, as some supervisors do."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Opens /dev/null for each closed standard stream. Otherwise the next file or socket would get the stream's number,
    and output of the process and its children would be written into it."""
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
