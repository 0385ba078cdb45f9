"""How many bytes of guessed experts are read ahead, in virtual time: never to a step's harm."""

from __future__ import annotations

import random

import pytest

from moeserve.kernels import _C

PIECE = 1 << 20
PIECES = 3  # of an expert
ROUTES = 8  # experts of a layer and token, of which a quarter are not in RAM
LAYERS, STEPS = 12, 60


class Disk:
    """Reads pieces one after another, `rate` bytes per second. What is being read is read to its end."""

    def __init__(self, rate: float) -> None:
        self._rate, self.now, self._free_at = rate, 0.0, 0.0

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def read(self, pieces: int) -> None:
        """Waits for demanded pieces."""
        self.now = self._free_at = max(self.now, self._free_at) + pieces * PIECE / self._rate

    def read_during(self, seconds: float, pieces: int) -> int:
        """Begins guessed pieces while the step computes. Returns how many."""
        begun, end = 0, self.now + seconds
        while begun < pieces and self._free_at < end:
            self._free_at = max(self.now, self._free_at) + PIECE / self._rate
            begun += 1
        return begun


def seconds_of(rate: float, pause: float, right: float, guesses: str) -> float:
    """The time of STEPS tokens. pause: between a layer's reads and the next layer's request. right: share of guesses
    that are asked for. guesses: "none", "all", or "measured"."""
    ahead, disk, rng = _C.ReadAhead(LAYERS), Disk(rate), random.Random(1)
    for _ in range(STEPS):
        begun = 0
        is_right = False
        for layer in range(LAYERS):
            missing = sum(rng.random() < 0.25 for _ in range(ROUTES)) * PIECES
            if layer:
                ahead.pause_ends(layer - 1, disk.now)
                ahead.guessed(1, int(is_right))
            disk.read(max(0, missing - (begun if is_right else 0)))
            worth = ahead.bytes_worth_reading(layer, rate, PIECE)
            most = {"none": 0, "all": PIECES, "measured": min(PIECES, -(-worth // PIECE))}[guesses]
            ahead.pause_begins(layer, disk.now)
            is_right = rng.random() < right
            begun = disk.read_during(pause, most)
            disk.compute(pause)
    return disk.now


@pytest.mark.parametrize("right", [0.3, 0.54, 0.9])
@pytest.mark.parametrize("pause", [0.2e-3, 2e-3])
@pytest.mark.parametrize("rate", [0.1e9, 0.5e9, 3e9, 12e9])
def test_guesses_never_cost_a_hundredth(rate: float, pause: float, right: float) -> None:
    none = seconds_of(rate, pause, right, "none")
    assert seconds_of(rate, pause, right, "measured") <= 1.01 * none


def test_guesses_on_a_slow_disk_are_not_read_and_would_cost_much() -> None:
    slow = (0.1e9, 2e-3, 0.54)
    assert seconds_of(*slow, "measured") == seconds_of(*slow, "none")
    assert seconds_of(*slow, "all") > 1.04 * seconds_of(*slow, "none")


def test_guesses_on_a_fast_disk_pay() -> None:
    fast = (3e9, 2e-3, 0.9)
    assert seconds_of(*fast, "measured") < 0.95 * seconds_of(*fast, "none")
    assert seconds_of(*fast, "measured") < 1.01 * seconds_of(*fast, "all")


def test_sure_guesses_are_read_although_they_take_longer_than_the_pause() -> None:
    """10 ms a piece, 2 ms of pause: from four of five right guesses on."""
    ahead = _C.ReadAhead(1)
    ahead.pause_begins(0, 0.0)
    ahead.pause_ends(0, 2e-3)
    rate = PIECE / 10e-3
    assert ahead.bytes_worth_reading(0, rate, PIECE) == 0
    ahead.guessed(100, 90)
    assert ahead.bytes_worth_reading(0, rate, PIECE) == PIECE
    assert ahead.bytes_worth_reading(0, 0.0, PIECE) == 0


def test_a_thread_without_a_core_hardly_lengthens_the_pause() -> None:
    ahead, rng = _C.ReadAhead(1), random.Random(2)
    for _ in range(1000):
        ahead.pause_begins(0, 0.0)
        ahead.pause_ends(0, 1.0 if rng.random() < 0.2 else 1e-3)
    assert 0.9e6 <= ahead.bytes_worth_reading(0, 1e9, 1000) <= 1.3e6
