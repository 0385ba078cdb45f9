"""Amounts of RAM and of GPU memory, which models share."""

from __future__ import annotations

from typing import NamedTuple

from moeserve.config.units import GIB


class Memory(NamedTuple):
    ram: int  # bytes
    gpu: int = 0  # bytes

    def plus(self, other: Memory) -> Memory:
        return Memory(self.ram + other.ram, self.gpu + other.gpu)

    def minus(self, other: Memory) -> Memory:
        return Memory(self.ram - other.ram, self.gpu - other.gpu)

    def fits(self, room: Memory) -> bool:
        return self.ram <= room.ram and (self.gpu <= room.gpu or self.gpu == 0)

    def text(self) -> str:
        gpu = f" and {self.gpu / GIB:.2f} GiB of GPU memory" if self.gpu else ""
        return f"{self.ram / GIB:.2f} GiB of RAM{gpu}"
