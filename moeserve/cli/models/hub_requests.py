"""`python -m moeserve.cli.models.hub_requests pull NAME` and `delete NAME [SERVED...]`, for clients of Ollama's API.

The server starts it as a process of its own, because a download takes hours and the hub's answers are not trusted. It
prints lines of JSON: `{"completed": BYTES, "total": BYTES}`, and at the end `{"done": true, "path": PATH}` or
`{"error": TEXT, "kind": KIND}`, where KIND is name, absent, served or hub. PATH is the model's file or folder; null if
only the parts of an interrupted download were deleted. SERVED are the paths of models that must stay.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from moeserve.config import LAUNCHER_PID_ENV
from moeserve.errors import UserError
from moeserve.hub import HubName, parse_name
from moeserve.processes.lifecycle import die_with

TOLD_EVERY_S: Final = 0.25


def main() -> int:
    verb, text, *served = sys.argv[1:]
    die_with(int(os.environ[LAUNCHER_PID_ENV]))
    name = parse_name(text)
    if name is None:
        _fail(
            "name", f"{text!r} is not a name on the Hub: use org/repo, org/repo:Q4_K_M or org/repo:file.gguf"
        )
        return 0
    try:
        _pull(name) if verb == "pull" else _delete(name, served)
    except (UserError, OSError) as error:
        _fail("hub", str(error))
    return 0


def _pull(name: HubName) -> None:
    from moeserve.hub.download import fetch
    from moeserve.processes.logs import set_up_logging

    set_up_logging("pull", "warning")
    _say(done=True, path=_plain(fetch(name, _teller())))


def _delete(name: HubName, served: Sequence[str]) -> None:
    from moeserve.hub.cache import find_cached, remove, remove_partial

    model = find_cached(name)
    if model is None and remove_partial(name):
        _say(done=True, path=None)
    elif model is None:
        _fail("absent", f"{name} is not downloaded")
    elif any(_is_within(model.path, Path(one)) for one in served):
        _fail("served", f"{name} is being served; stop the server first")
    else:
        path = _plain(model.path)
        remove(model)
        _say(done=True, path=path)


def _plain(path: Path) -> str:
    """Returns a text that is the same for all links to one model. A model's file is itself a link within the hub's
    cache."""
    return str(path.parent.resolve() / path.name)


def _is_within(model: Path, served: Path) -> bool:
    return model.resolve() in (served.resolve(), *served.resolve().parents)


def _teller() -> Callable[[int, int], None]:
    told_at = 0.0

    def tell(completed: int, total: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if now - told_at >= TOLD_EVERY_S or completed >= total:
            told_at = now
            _say(completed=completed, total=total)

    return tell


def _fail(kind: str, text: str) -> None:
    _say(error=text, kind=kind)


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    sys.exit(main())
