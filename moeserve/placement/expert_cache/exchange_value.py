"""What it is worth to exchange a cached expert for one that was missed: reads that the CPU is spared.

Each exchange that could be made is watched for WATCHED steps, whether it is made or not: the steps that use the
newcomer, less those that use what it would replace. So it is known before the first byte is copied whether a text
repeats itself, and what a promotion brings where it does. Exchanges are told apart by their gain in score: of many
streams, those of a small gain may cost more than they bring while others pay.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WATCHED = 32  # steps
EDGES = np.array([0.5, 0.8, 1.2, 1.7, 2.5], np.float32)  # of gains in score: bands of like exchanges
BANDS = len(EDGES) + 1
KEEP = 1.0 - 1.0 / 64  # of the sums, a step
EVIDENCE = 4 * WATCHED  # steps of exchanges watched, without which nothing is expected
DOUBT = 2.0  # standard deviations that chance may have added
NEVER = -(1 << 40)

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def band_of(gain: npt.NDArray[np.float32]) -> Ids:
    """int64 [exchanges]."""
    return np.searchsorted(EDGES, gain).astype(np.int64)


class ExchangeValue:
    """One step after another: `expected`, then `observe` and `watch`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        """shape: layers, experts of a layer."""
        # The step in which an expert could last have come, or gone for one that came; and the band of that.
        self._came, self._went = np.full(shape, NEVER), np.full(shape, NEVER)
        self._came_band, self._went_band = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._step = 0
        # By band, sums that decay: reads spared, reads seen of either expert, steps of exchanges watched.
        self._spared, self._seen, self._watched = np.zeros(BANDS), np.zeros(BANDS), np.zeros(BANDS)

    def observe(self, used: Mask) -> None:
        """A step used these experts, [layers, experts]."""
        self._step += 1
        since = self._step - WATCHED
        came, went = self._came >= since, self._went >= since
        more, fewer = _by_band(self._came_band[came & used]), _by_band(self._went_band[went & used])
        self._spared = KEEP * self._spared + (more - fewer)
        self._seen = KEEP * self._seen + (more + fewer)
        self._watched = KEEP * self._watched + _by_band(self._came_band[came])

    def expected(self) -> npt.NDArray[np.float64]:
        """float64 [BANDS]: reads that an exchange spares within WATCHED steps, at least; 0 where too few were seen."""
        found = np.zeros(BANDS)
        known = self._watched >= EVIDENCE
        least = self._spared - DOUBT * np.sqrt(self._seen)
        found[known] = WATCHED * least[known] / self._watched[known]
        return found

    def watch(self, layers: Ids, incoming: Ids, outgoing: Ids, bands: Ids) -> None:
        """int64 [exchanges] each, no expert twice: these could be made now. Those whose experts are being watched are
        left out, but for a newcomer of a higher band."""
        since = self._step - WATCHED
        known = (self._came[layers, incoming] >= since) & (self._came_band[layers, incoming] >= bands)
        new = ~known & (self._went[layers, outgoing] < since)
        layers, incoming, outgoing, bands = layers[new], incoming[new], outgoing[new], bands[new]
        self._came[layers, incoming] = self._went[layers, outgoing] = self._step
        self._came_band[layers, incoming] = self._went_band[layers, outgoing] = bands


def _by_band(bands: Ids) -> Ids:
    return np.bincount(bands, minlength=BANDS)
