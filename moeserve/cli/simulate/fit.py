"""Fits the step-time model to measured steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeserve.cli.simulate.step_time import StepLoad, StepTime

Floats = npt.NDArray[np.float64]

REWEIGHTINGS = 20
SMALLEST_ERROR = 0.003  # relative; smaller errors are noise, and all get the same weight
LEAST_GAIN = 1e-9  # relative; smaller gains are rounding errors


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step."""

    load: StepLoad
    seconds: float


def fit(samples: Sequence[StepSample], source: str) -> StepTime:
    """Fits a model of steps' durations to measured steps, and returns it. It minimises the sum of absolute relative
    errors, so a short step counts as much as a long one, and an interrupted step does not distort the model.

    The points of `base` are the sizes of the steps, in tokens. Decode steps have points of their own if there are at
    least two sizes of decode steps and two of other steps. Raises ValueError if all steps have the same size.
    """
    decode = sorted({sample.load.tokens for sample in samples if sample.load.is_decode})
    knots = sorted({sample.load.tokens for sample in samples if not sample.load.is_decode})
    if min(len(decode), len(knots)) < 2:
        knots, decode = sorted({*decode, *knots}), []
    if len(knots) < 2:
        raise ValueError("steps of at least two different sizes are needed")
    tried = [
        _fit(samples, source, knots, decode, adds_rows=adds) for adds in (False, True)[: 1 + bool(decode)]
    ]
    return min(tried, key=lambda model: float(abs(relative_errors(model, samples)).mean()))


def _fit(
    samples: Sequence[StepSample], source: str, knots: list[int], decode: list[int], *, adds_rows: bool
) -> StepTime:
    rows = [_features(sample.load, knots, decode, adds_rows) / sample.seconds for sample in samples]
    features = np.stack(rows)
    weights = np.ones(len(samples))
    for _ in range(
        REWEIGHTINGS
    ):  # iteratively reweighted least squares, which converges to least absolute errors
        found = _non_negative(features * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(abs(features @ found - 1), SMALLEST_ERROR))
    seconds = np.cumsum(found[: len(knots)]).tolist()
    of_decode = np.cumsum(found[len(knots) : len(knots) + len(decode)]).tolist()
    context, decode_span, pairs, sampled, sampling, prompt, span = found[len(knots) + len(decode) :].tolist()
    return StepTime(
        source,
        knots,
        seconds,
        context,
        pairs,
        sampled,
        prompt,
        span,
        decode_rows=decode,
        decode_seconds=of_decode,
        adds_rows=adds_rows,
        decode_span=decode_span,
        sampling=sampling,
    )


def relative_errors(model: StepTime, samples: Sequence[StepSample]) -> Floats:
    """Returns model / measured - 1: float64 [samples]."""
    return np.array([model.of(sample.load) / sample.seconds - 1 for sample in samples])


def _features(load: StepLoad, knots: list[int], decode: list[int], adds_rows: bool) -> Floats:
    """Returns a step's features, float64: the fraction of `base`'s first point and of each rise to the next point, then
    the same for the points of decode steps, then the linear features."""
    if decode and load.is_decode:
        # The points of decode steps include sampling, and decode steps have no prompt features.
        linear = _linear(load._replace(sampled_rows=0))
        return np.array([*[0.0] * len(knots), *_rises(load.tokens, decode), *linear], np.float64)
    adds = adds_rows and load.decode_rows > 0
    others = load.without_rows if adds else load
    rows = _rises(load.decode_rows, decode) if adds else [0.0] * len(decode)
    linear = _linear(others._replace(decode_context=load.decode_context, decode_span=load.decode_span))
    return np.array([*_rises(others.tokens, knots), *rows, *linear], np.float64)


def _linear(load: StepLoad) -> list[float]:
    """Returns the quantities by which StepTime's coefficients are multiplied."""
    of_rows = [load.decode_context, load.decode_span]
    sampling = [load.sampled_rows, float(load.sampled_rows > 0)]
    return [*of_rows, load.prefill_pairs, *sampling, load.has_prompt, load.prompt_span]


def _rises(size: int, knots: list[int]) -> list[float]:
    pairs = itertools.pairwise(knots)
    return [1.0, *(min(max((size - low) / (high - low), 0.0), 1.0) for low, high in pairs)]


def _non_negative(features: Floats, target: Floats) -> Floats:
    """Solves least squares without negative coefficients, because times are not negative: Lawson and Hanson's
    active-set method (Solving Least Squares Problems, 1974, chapter 23). Columns are scaled to unit norm first: their
    sizes span ten orders of magnitude."""
    size = np.linalg.norm(features, axis=0)
    scaled = features / np.where(size > 0, size, 1.0)
    result = np.zeros(features.shape[1])
    chosen = np.zeros(len(result), bool)
    for _ in range(3 * len(result)):
        gradient = np.where(chosen, 0.0, scaled.T @ (target - scaled @ result))
        if gradient.max() <= LEAST_GAIN * np.linalg.norm(target):
            break
        chosen[gradient.argmax()] = True
        while True:
            solved = np.zeros(len(result))
            solved[chosen], *_ = np.linalg.lstsq(scaled[:, chosen], target)
            below = chosen & (solved <= 0)
            if not below.any():
                break
            # Moves towards the solution until a coefficient reaches zero; that one becomes inactive again.
            way = (result[below] / (result[below] - solved[below])).min()
            result += way * (solved - result)
            chosen &= result > LEAST_GAIN
        result = solved
    return result / np.where(size > 0, size, 1.0)
