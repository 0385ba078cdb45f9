"""Fits the step-time model to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeserve.simulate.step_time import StepLoad, StepTime

Floats = npt.NDArray[np.float64]

REWEIGHTINGS = 20
SMALLEST_ERROR = 0.003  # relative; smaller errors get the same weight: they are noise


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step."""

    load: StepLoad
    seconds: float


def fit(samples: Sequence[StepSample], source: str) -> StepTime:
    """Minimises the sum of absolute relative errors: a short step counts as much as a long one, and a step that was
    interrupted does not distort the model. The points of `base` are the sizes of the steps, in tokens. Raises
    ValueError when all steps have the same size."""
    knots = sorted({sample.load.tokens for sample in samples})
    if len(knots) < 2:
        raise ValueError("steps of at least two different sizes are needed")
    features = np.stack([_features(sample.load, knots) / sample.seconds for sample in samples])
    weights = np.ones(len(samples))
    for _ in range(
        REWEIGHTINGS
    ):  # iteratively reweighted least squares, which converges to least absolute errors
        found = _non_negative(features * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(abs(features @ found - 1), SMALLEST_ERROR))
    seconds = np.maximum.accumulate(found[: len(knots)])
    return StepTime(source, knots, seconds.tolist(), *found[len(knots) :].tolist())


def relative_errors(model: StepTime, samples: Sequence[StepSample]) -> Floats:
    """Model over measured, less 1; float64 [samples]."""
    return np.array([model.of(sample.load) / sample.seconds - 1 for sample in samples])


def _features(load: StepLoad, knots: list[int]) -> Floats:
    """The interpolation weight of each point of `base` at this number of tokens, then the features that StepTime's
    coefficients are of, in its order; float64."""
    weights = [np.interp(load.tokens, knots, np.eye(len(knots))[place]) for place in range(len(knots))]
    return np.array([*weights, *load[1:]], np.float64)


def _non_negative(features: Floats, target: Floats) -> Floats:
    """Least squares in which negative coefficients are set to zero and the rest solved again, since a negative time is
    noise. Columns are scaled to unit norm first: their sizes span ten orders of magnitude."""
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
