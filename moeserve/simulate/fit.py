"""Finds the step-time model that measured steps follow best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeserve.simulate.step_time import StepLoad, StepTime

Floats = npt.NDArray[np.float64]

REWEIGHTINGS = 20
SMALLEST_ERROR = 0.003  # below it two errors are alike: timers and caches are no better


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step."""

    load: StepLoad
    seconds: float


def fit(samples: Sequence[StepSample], source: str) -> StepTime:
    """The least sum of absolute relative errors: a short step counts as much as a long one, and a step that was
    interrupted does not bend the model. The points of `base` are the sizes of the steps. Raises ValueError when
    there is one size only."""
    knots = sorted({sample.load.tokens for sample in samples})
    if len(knots) < 2:
        raise ValueError("steps of at least two different sizes are needed")
    features = np.stack([_features(sample.load, knots) / sample.seconds for sample in samples])
    weights = np.ones(len(samples))
    for _ in range(REWEIGHTINGS):  # least squares, reweighted until it is least absolute errors
        found = _non_negative(features * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(abs(features @ found - 1), SMALLEST_ERROR))
    seconds = np.maximum.accumulate(found[: len(knots)])
    context, pairs, sampled = found[len(knots) :].tolist()
    return StepTime(source, knots, seconds.tolist(), context, pairs, sampled)


def relative_errors(model: StepTime, samples: Sequence[StepSample]) -> Floats:
    """Model over measured, less 1; float64 [samples]."""
    return np.array([model.of(sample.load) / sample.seconds - 1 for sample in samples])


def _features(load: StepLoad, knots: list[int]) -> Floats:
    """The weight of each point of `base` at this number of tokens, then what the linear terms multiply."""
    weights = [np.interp(load.tokens, knots, np.eye(len(knots))[place]) for place in range(len(knots))]
    return np.array([*weights, load.decode_context, load.prefill_pairs, load.sampled_rows], np.float64)


def _non_negative(features: Floats, target: Floats) -> Floats:
    """Least squares in which a coefficient that comes out negative is set to zero and the rest found again: a
    negative time is noise. Columns are scaled to one size first: theirs span ten orders of magnitude."""
    size = np.linalg.norm(features, axis=0)
    active = size > 0
    result = np.zeros(features.shape[1])
    while True:
        columns = np.flatnonzero(active)
        solved, *_ = np.linalg.lstsq(features[:, columns] / size[columns], target)
        if (solved >= 0).all():
            result[columns] = solved / size[columns]
            return result
        active[columns[solved < 0]] = False
