"""Keeps the measured speeds of CPU products on disk, so that the next start need not measure them again.

There is one file per machine and pool in the user's cache directory. It names the build that was measured. Any program
of the user may write there, so the contents are checked; they only affect which form of a product computes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from moeserve.kernels import _C
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.quantization import QUANT_TYPES

FOLDER: Final = "moeserve"
LAYOUT: Final = (
    3  # of the file: another one has another name, so that versions do not find each other's damaged
)
MOST_BYTES: Final = 1 << 16  # largest file
MOST_AGE_S: Final = (
    30 * 24 * 3600.0
)  # a virtual machine may have moved to another host, and one measurement may have been disturbed
SPEEDS: Final = (0.01, 100.0)  # a relative speed is between these
_CPU_FIELDS: Final = frozenset(
    {
        *("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "cache size", "flags"),
        *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
    }
)

log = logging.getLogger(__name__)

# By ggml's number of the type: for 1, 2, ... FEW_TOKENS and for more tokens, the speeds of the forms that the product
# has beside its usual one.
Speeds = dict[int, list[list[float]]]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    build: str
    measured_at: float  # of the oldest speed, in seconds since 1970
    speeds: dict[str, list[list[float]]]  # by the type's name

    def check(self) -> None:
        """Raises ValueError for contents that no measurement can have produced."""
        unknown = self.speeds.keys() - _NUMBERS.keys()
        if unknown:
            raise ValueError(f"there is no type {min(unknown)!r}")
        low, high = SPEEDS
        for name, speeds in self.speeds.items():
            if not 1 <= len(speeds) <= _C.FEW_TOKENS + 1 or not all(speeds):
                raise ValueError(f"{name} has no such speeds")
            if not all(low < speed < high for of_forms in speeds for speed in of_forms):
                raise ValueError(f"{name} has no such speeds")


_NUMBERS: Final = {kind.name: number for number, kind in QUANT_TYPES.items()}


class KeptSpeeds:
    """The speeds of one machine and pool. Creates the file at the first write."""

    def __init__(self, path: Path | None, build: str) -> None:
        """path: None keeps nothing. build: identifies the kernels; speeds of another build are not returned."""
        self._path, self._build = path, build
        self._measured_at = time.time()
        self._known: Speeds = {}

    @property
    def date(self) -> str:
        """The day of the oldest speed, as 2026-11-29."""
        return time.strftime("%Y-%m-%d", time.localtime(self._measured_at))

    def read(self) -> Speeds:
        """Returns the kept speeds; an empty dict if there is no file, or it is from another build, too old or invalid.
        An invalid file is logged."""
        try:
            found = None if self._path is None else _read(self._path)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("speeds of products are measured again: %s: %s", self._path, error)
            return {}
        if found is None or found.build != self._build:
            return {}
        if not 0.0 <= time.time() - found.measured_at < MOST_AGE_S:
            return {}
        self._measured_at = found.measured_at
        self._known = {_NUMBERS[name]: speeds for name, speeds in found.speeds.items()}
        return dict(self._known)

    def add(self, speeds: Mapping[int, Sequence[list[float]]]) -> None:
        """Replaces the file atomically with the speeds that were read and `speeds`. If that fails, a line is logged,
        and the next start measures again."""
        if self._path is None or not speeds:
            return
        self._known |= {number: list(of_type) for number, of_type in speeds.items()}
        named = {QUANT_TYPES[number].name: of_type for number, of_type in self._known.items()}
        content = msgspec.json.encode(_File(self._build, self._measured_at, named))
        unnamed = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unnamed.unlink(missing_ok=True)
            with open(os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
            unnamed.replace(self._path)
        except OSError as error:
            log.info("speeds of products are not kept for the next start: %s", error)


def kept_speeds(stream: CpuStream) -> KeptSpeeds:
    """Returns the speeds kept for this machine's CPU and for pools like `stream`'s."""
    of_pool = (_cpu(), stream.isa, stream.threads, stream.nodes, LAYOUT)
    key = hashlib.sha256(repr(of_pool).encode()).hexdigest()[:16]
    folder = cache_folder(os.environ)
    return KeptSpeeds(None if folder is None else folder / f"products-{key}.json", _build())


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Returns moeserve's folder in the user's cache directory; None without a home directory. Relative paths are
    ignored, as the XDG base directory specification demands."""
    cache = environment.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / FOLDER


def _read(path: Path) -> _File:
    """Reads a file. Raises OSError, and MsgspecError or ValueError for a file that is invalid or belongs to another
    user."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(opened, "rb") as file:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("not a file of this user")
        if status.st_size > MOST_BYTES:
            raise ValueError(f"{status.st_size} bytes; at most {MOST_BYTES} are read")
        found = msgspec.json.decode(file.read(MOST_BYTES), type=_File)
    found.check()
    return found


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Returns the lines that identify the CPU models, their features and microcode, each once."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.partition(":")[0].strip() in _CPU_FIELDS})


def _build() -> str:
    """Returns a hash of the compiled kernels. The version number would not do: in a checkout the kernels change without
    it."""
    return hashlib.sha256(Path(_C.__file__).read_bytes()).hexdigest()[:32]
