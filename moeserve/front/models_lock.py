"""The lock that the fronts of one server share. In an upgrade the next front loads no model until the earlier front has
ended, because both would fill the same memory."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from pathlib import Path
from typing import Final

LOCK: Final = "models.lock"
LOOK_S: Final = 0.1  # between two attempts

log = logging.getLogger(__name__)


async def hold_models_lock(folder: Path) -> None:
    """Waits until no other front loads models, and keeps them from it until this process ends. folder: holds the lock's
    file; the server before an upgrade and the one after it have the same. Raises OSError."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    is_told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not is_told:
                log.info("models are loaded when the server before this one has ended")
                is_told = True
            await asyncio.sleep(LOOK_S)
