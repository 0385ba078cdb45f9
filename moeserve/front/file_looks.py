"""Looks at models' files in threads, each with a deadline. A network file system that hangs keeps a thread waiting, but
neither the event loop nor the requests for other models."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

DEADLINE_S: Final = 5.0
MOST_THREADS: Final = 256  # that may wait for file systems at once

T = TypeVar("T")


class FileLooks:
    """One look at a time for each key: later callers get the result of the look that is under way. So a file system
    that hangs holds one thread for each key, and only the first callers wait for it until the deadline."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._under_way: dict[Hashable, tuple[asyncio.Future[Any], float]] = {}

    async def look(self, key: Hashable, function: Callable[[], T]) -> T:
        """Returns what `function` returns in a thread, or raises what it raises. Raises TimeoutError if the look has
        not ended `deadline_s` seconds after it began; its thread goes on."""
        if key not in self._under_way:
            if len(self._under_way) >= MOST_THREADS:
                raise TimeoutError
            self._begin(key, function)
        result, deadline = self._under_way[key]
        async with asyncio.timeout_at(deadline):
            found: T = await asyncio.shield(result)
        return found

    def _begin(self, key: Hashable, function: Callable[[], T]) -> None:
        loop = asyncio.get_running_loop()
        # A thread of its own: asyncio's are few, and some would wait for file systems that hang.
        with_one_thread = ThreadPoolExecutor(1, "file-look")
        result = loop.run_in_executor(with_one_thread, function)
        with_one_thread.shutdown(wait=False)
        self._under_way[key] = result, loop.time() + self._deadline_s

        def end(ended: asyncio.Future[T]) -> None:
            del self._under_way[key]
            if not ended.cancelled():
                ended.exception()  # it counts as retrieved, also if no caller waits any more

        result.add_done_callback(end)


def existing(paths: Iterable[str]) -> set[str]:
    """Returns the paths that exist, and the paths whose file system does not answer within the deadline. For a process
    whose event loop has nothing to do yet."""
    absent: set[str] = set()

    def look(path: str) -> None:
        if not os.path.exists(path):
            absent.add(path)

    wanted = set(paths)
    threads = [threading.Thread(target=look, args=(path,), daemon=True) for path in wanted]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return wanted - absent
