"""Bytes of RAM and of each GPU's memory, which models share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from moeserve.config.units import GIB


class Memory(NamedTuple):
    ram: int  # bytes
    gpus: tuple[int, ...] = ()  # bytes by GPU number; GPUs beyond the last have 0

    @property
    def gpu(self) -> int:
        """Returns the bytes of all GPUs together."""
        return sum(self.gpus)

    def plus(self, other: Memory) -> Memory:
        pairs = zip_longest(self.gpus, other.gpus, fillvalue=0)
        return Memory(self.ram + other.ram, tuple(mine + its for mine, its in pairs))

    def minus(self, other: Memory) -> Memory:
        pairs = zip_longest(self.gpus, other.gpus, fillvalue=0)
        return Memory(self.ram - other.ram, tuple(mine - its for mine, its in pairs))

    def fits(self, room: Memory) -> bool:
        pairs = zip_longest(self.gpus, room.gpus, fillvalue=0)
        return self.ram <= room.ram and all(mine <= its or mine == 0 for mine, its in pairs)

    def text(self) -> str:
        taken = {place: size for place, size in enumerate(self.gpus) if size}
        if list(taken) in ([], [0]):
            gpu = f" and {self.gpu / GIB:.2f} GiB of GPU memory" if self.gpu else ""
        else:
            gpu = "".join(f" and {size / GIB:.2f} GiB of GPU {place}" for place, size in taken.items())
        return f"{self.ram / GIB:.2f} GiB of RAM{gpu}"


@dataclass(frozen=True)
class Held:
    """Memory and folders that one or several leaving fronts hold. `folders`: folders that only one server may use at a
    time."""

    memory: Memory
    folders: frozenset[str] = frozenset()
    ram_budget: int | None = None  # bytes for all models together; None: not known
    gpus: list[int] | None = None  # bytes of each GPU before any load; None: not known
