"""Estimates the value of exchanging a cached expert for a missed one: the expert reads that it saves the CPU.

Every possible exchange is watched for WATCHED steps, whether it is made or not. Its value is the number of these steps
that use the incoming expert, minus the number that use the outgoing one. So values are known before any weights are
copied. Exchanges are grouped into bands by their gain in score, because with many concurrent streams small gains may
cost more than they save while large gains pay.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WATCHED = 32  # steps
EDGES = np.array([0.5, 0.8, 1.2, 1.7, 2.5], np.float32)  # limits of the bands, as gains in score
BANDS = len(EDGES) + 1
KEEP = 1.0 - 1.0 / 64  # decay per step of the sums
EVIDENCE = 4 * WATCHED  # watched steps without which the expected value is 0
DOUBT = 2.0  # standard deviations subtracted from the mean as a safety margin
NEVER = -(1 << 40)

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def band_of(gain: npt.NDArray[np.float32]) -> Ids:
    """Returns the band of each gain: int64 [exchanges]."""
    return np.searchsorted(EDGES, gain).astype(np.int64)


class ExchangeValue:
    """Estimates the saved reads. Per step call `expected`, then `observe` and `watch`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        """shape: (layers, experts per layer)."""
        # Per expert: when the watch of the last exchange that would promote it (came) or evict it (went) began, in
        # steps; and that exchange's band.
        self._came, self._went = np.full(shape, NEVER), np.full(shape, NEVER)
        self._came_band, self._went_band = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._step = 0
        # Decaying sums per band: saved reads, reads of either expert, watched steps.
        self._spared, self._seen, self._watched = np.zeros(BANDS), np.zeros(BANDS), np.zeros(BANDS)

    def observe(self, used: Mask) -> None:
        """Records the experts that a step used, bool [layers, experts]."""
        self._step += 1
        since = self._step - WATCHED
        came, went = self._came >= since, self._went >= since
        more, fewer = _by_band(self._came_band[came & used]), _by_band(self._went_band[went & used])
        self._spared = KEEP * self._spared + (more - fewer)
        self._seen = KEEP * self._seen + (more + fewer)
        self._watched = KEEP * self._watched + _by_band(self._came_band[came])

    def expected(self) -> npt.NDArray[np.float64]:
        """Returns float64 [BANDS]: a lower bound of the reads that an exchange saves within WATCHED steps; 0 for
        bands with too few observations."""
        found = np.zeros(BANDS)
        known = self._watched >= EVIDENCE
        least = self._spared - DOUBT * np.sqrt(self._seen)
        found[known] = WATCHED * least[known] / self._watched[known]
        return found

    def watch(self, layers: Ids, incoming: Ids, outgoing: Ids, bands: Ids) -> None:
        """Starts to watch possible exchanges, given as int64 [exchanges] each; no expert occurs twice. An exchange
        is skipped if one of its experts is being watched already, except an incoming expert in a lower band."""
        since = self._step - WATCHED
        known = (self._came[layers, incoming] >= since) & (self._came_band[layers, incoming] >= bands)
        new = ~known & (self._went[layers, outgoing] < since)
        layers, incoming, outgoing, bands = layers[new], incoming[new], outgoing[new], bands[new]
        self._came[layers, incoming] = self._went[layers, outgoing] = self._step
        self._came_band[layers, incoming] = self._went_band[layers, outgoing] = bands


def _by_band(bands: Ids) -> Ids:
    return np.bincount(bands, minlength=BANDS)
