"""Whether what was downloaded is what the hub has announced.

The hub names a file's content by a hash, its ETag: SHA-256 for the large ones, which Git LFS keeps, and Git's own hash
of a blob, with SHA-1, for the others.
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import Final

from .errors import HubError

log = logging.getLogger(__name__)

_PIECE: Final = 1 << 20
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_GIT_BLOB: Final = re.compile(r"[0-9a-f]{40}")


def check_content(what: str, path: Path, announced: str) -> None:
    """Removes the file and raises HubError, which begins with `what`, where its hash is not `announced`."""
    if _SHA256.fullmatch(announced):
        digest = hashlib.sha256()
    elif _GIT_BLOB.fullmatch(announced):
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    else:
        log.warning(
            "%s: the hub names its content %s, which is no hash; nothing was compared", what, announced
        )
        return
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    if digest.hexdigest() != announced:
        path.unlink()
        raise HubError(
            f"{what}: what came has the hash {digest.hexdigest()}, and the hub has announced {announced}: the file was "
            "damaged or replaced on its way and has been removed; start again, or check HF_ENDPOINT"
        )
