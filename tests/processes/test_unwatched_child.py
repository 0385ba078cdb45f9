"""A child process that the launcher could not watch is not left running."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from moeserve.launcher.child_process import Child


def test_a_process_that_cannot_be_watched_is_ended() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with patch("os.pidfd_open", side_effect=full), pytest.raises(OSError, match="Too many open files"):
        Child.adopt("worker", sleeper.pid)
    assert sleeper.wait(30) == -9
