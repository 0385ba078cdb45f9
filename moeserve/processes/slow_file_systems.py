"""Says whether a path is on a file system that reads far slower than a local disk, by the kernel's list of mounts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/")
_SHARED: Final = "a drive of Windows under WSL, or a folder that a virtual machine shares"
_NETWORK: Final = "a network drive"
_BUCKET: Final = "a bucket of an object store"
_SLOW: Final = {
    **dict.fromkeys(("9p", "drvfs", "virtiofs", "vboxsf", "fuse.vmhgfs-fuse"), _SHARED),
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "fuse.rclone"), _NETWORK),
    **dict.fromkeys(("fuse.s3fs", "fuse.gcsfuse"), _BUCKET),
}


def slow_file_system(path: Path, root: Path = _ROOT) -> str | None:
    """Returns what the path is on and the file system's type, as in "a network drive (nfs4)"; None if it is none of
    these, or the kernel does not say."""
    real = os.path.realpath(path)
    kind, longest = "", -1
    try:
        for point, file_system in _mounts(root):
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= longest:  # of two mounts at one place the later one is seen
                kind, longest = file_system, len(point)
    except OSError:
        return None
    return f"{_SLOW[kind]} ({kind})" if kind in _SLOW else None


def _mounts(root: Path) -> Iterator[tuple[str, str]]:
    """Yields each mount point and its file system's type, in the order of mounting (proc_pid_mountinfo(5))."""
    for line in (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        fields, types = before.split(" "), after.split(" ")
        if len(fields) > 4:
            yield re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]), types[0]
