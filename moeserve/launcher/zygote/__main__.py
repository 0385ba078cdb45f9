"""`python -m moeserve.launcher.zygote`: runs the zygote."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from moeserve.processes.imports_without_gc import imports_without_gc

with imports_without_gc():
    from moeserve.detokenizer.__main__ import main as detokenizer
    from moeserve.detokenizer.__main__ import read_vocabulary
    from moeserve.errors import UserError
    from moeserve.launcher.zygote.forking import Main, serve_forks
    from moeserve.processes.lifecycle import Process, line_to_launcher, run_process
    from moeserve.router.__main__ import main as router
    from moeserve.tokenizer import Vocabulary

log = logging.getLogger(__name__)


def main(process: Process) -> None:
    line = line_to_launcher()
    assert line is not None, "the launcher gives it a line"
    vocabulary = _vocabulary(Path(process.config.model))
    mains: dict[str, Main] = {"router": router, "detokenizer": partial(detokenizer, vocabulary=vocabulary)}
    serve_forks(process, line, mains)


def _vocabulary(model: Path) -> Vocabulary | None:
    """Returns the vocabulary; None if it cannot be read. The detokenizer then tries again and reports the error."""
    try:
        return read_vocabulary(model)
    except (UserError, OSError, MemoryError) as error:
        log.debug("no vocabulary: %s", error)
        return None


if __name__ == "__main__":
    run_process("zygote", main)
