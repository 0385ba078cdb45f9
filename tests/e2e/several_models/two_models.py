"""Two models behind one port."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from moeserve.cli.command_line import demonstration_model

PATIENCE_S = 300.0  # for a load on a busy machine, as --model-load-timeout


def two_models(folder: Path) -> list[str]:
    """Makes the files of two models `a` and `b` in `folder`. Returns the flags with which a server has both."""
    files = [folder / f"{name}.gguf" for name in "ab"]
    for file in files:
        shutil.copy(demonstration_model(), file)
    listed = folder / "models.yaml"
    listed.write_text(json.dumps([{"model": str(file)} for file in files]))
    return ["--models-file", str(listed)]
