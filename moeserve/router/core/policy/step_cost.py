"""Predicts the duration of a step in milliseconds, by a linear model fitted online to finished steps (least
squares).

    ms = c0 + c1 rows + c2 experts + c3 decode context
       + c4 prompt tokens + c5 prompt context + c6 has a prompt + c7 span

- `experts` is the number of distinct experts that a layer reads, as a multiple of one token's. With k of E experts per
  token and even routing, n tokens reach E (1 - (1 - k/E)^n) experts, so the feature grows like n at first and
  saturates at E/k. Small steps are bound by reading weights; hence a few prompt tokens beside a decode row are
  expensive, and many are cheap per token.
- c6 is a fixed cost of a step with prompt tokens. It is large on a GPU: a decode step is one CUDA graph of kernels for
  few rows, while a prompt's step launches its kernels one by one, 25 ms for 16 tokens as for 512 (an H200, 48 layers).
  So throughput saturates with the chunk's size; chunk sizes are chosen by this curve.
- `span` is the end position of the step's farthest chunk. A few tokens far into a prompt use only part of a GPU, and
  scan all keys before them as slowly as many tokens would; again the chunk's size hardly matters.
- A context is the sum, over rows or prompt tokens, of the positions that each attends to.

Relative errors are minimised, so a decode step of 10 ms counts as much as a prefill step of a second. Steps without
and with prompt tokens decay separately, so that an hour of decoding does not erase what was learnt about prefill; so do
steps with drafts, which would erase what a step takes without.
Coefficients are never negative, so predictions are monotone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moeserve.messages.steps import MeasuredStep

NUM_FEATURES = 8
ROWS, EXPERTS, DECODE_CONTEXT, PROMPT, PROMPT_CONTEXT, HAS_PROMPT, SPAN = range(1, NUM_FEATURES)
Vector = list[float]

MEMORY = 32.0  # a step's weight decays by 1 - 1/MEMORY with each later step of its kind
# Relative damping of the diagonal elements (Marquardt's scaling). Features that the data cannot separate share the cost
# in inverse proportion to it. Prompt features are damped least, so an ambiguous cost is attributed to them: smaller
# chunks are planned then, which resolve the ambiguity; with large chunks only, it would remain. The fixed cost of a
# prompt and its span are damped most: they are 0 on a CPU, and most of a step on a GPU.
DAMPING = (1e-3, 1e-3, 1e-3, 1e-3, 1e-4, 1e-4, 1e-1, 1e-1)
OUTLIER = 1.0  # relative error beyond which a step weighs less, as another process may have used the machine
# the model is solved after each of this many first steps of a kind, later every SOLVE_EVERY steps
LEARNING = 32
SOLVE_EVERY = 8  # a solution takes some 30 us
FIRST_CHUNK = 64  # prompt tokens beside decode rows before any step with both was measured
GROWTH = 2  # largest planned chunk as a multiple of the largest measured one
QUANTILE = 0.99  # quantile of actual / predicted that steps under a latency limit use
QUANTILE_STEP = 0.05
FIRST_SPREAD = 1.2


@dataclass(frozen=True, slots=True)
class StepShape:
    """The features of a step: numbers of rows, prompt tokens and attended positions (see the module's docstring)."""

    rows: int = 0
    decode_context: int = 0
    prompt: int = 0
    prompt_context: int = 0
    prompt_span: int = 0


class StepCost:
    def __init__(self, num_experts: int = 0, experts_per_token: int = 0) -> None:
        """num_experts: per layer. For a dense model (0) the experts feature is constant."""
        self._share = experts_per_token / num_experts if num_experts else 1.0
        self._costs: Vector = [0.0] * NUM_FEATURES
        # of steps with rows only, with drafts, and with prompt tokens
        self._kinds = tuple(_NormalEquations() for _ in range(3))
        self._unsolved = 0
        self._num_steps = [0, 0]  # observed, without and with prompt tokens
        self._largest_prompt = 0
        self._spread = FIRST_SPREAD  # the QUANTILE of actual / predicted

    @property
    def is_fitted(self) -> bool:
        return any(self._costs)

    # ---------------------------------------------------------------- learning

    def learn(self, measured: Iterable[MeasuredStep]) -> None:
        for m in measured:
            prompt = (m.prompt, chunk_context(m.start, m.prompt), m.start + m.prompt)
            self.observe(StepShape(m.rows, m.decode_context, *prompt), m.ms)

    def observe(self, shape: StepShape, ms: float, *, has_drafts: bool = False) -> None:
        """Learns from a step of this shape that took `ms` milliseconds; 0 means not measured. has_drafts: some of its
        rows are drafts."""
        if ms <= 0.0:
            return
        predicted = self.predict(shape)
        error = abs(ms / predicted - 1.0) if predicted > 0.0 else 0.0
        features = self._features(shape)
        kind = 2 if shape.prompt else int(has_drafts)
        self._kinds[kind].add([f / ms for f in features], min(1.0, OUTLIER / max(error, 1e-9)))
        if shape.prompt:
            self._largest_prompt = max(self._largest_prompt, shape.prompt)
            if predicted > 0.0 and shape.rows:
                over = ms > predicted * self._spread
                self._spread *= 1.0 + QUANTILE_STEP * (QUANTILE if over else QUANTILE - 1.0)
                self._spread = min(max(self._spread, 1.0), 2.0)
        self._unsolved += 1
        self._num_steps[shape.prompt > 0] += 1
        learning = self._num_steps[shape.prompt > 0] <= LEARNING
        if learning or self._unsolved == SOLVE_EVERY or not self.is_fitted:
            self._solve()

    def _solve(self) -> None:
        """Solves for the coefficients. The most negative coefficient is set to 0 and the rest solved again, until no
        coefficient is negative."""
        self._unsolved = 0
        plain, drafted, prompts = self._kinds
        matrix = [
            [a + b + c for a, b, c in zip(*rows, strict=True)]
            for rows in zip(plain.matrix, drafted.matrix, prompts.matrix, strict=True)
        ]
        right = [a + b + c for a, b, c in zip(plain.right, drafted.right, prompts.right, strict=True)]
        active = [i for i in range(NUM_FEATURES) if matrix[i][i] > 0.0]
        while active:
            chosen = [[matrix[i][j] * (1.0 + DAMPING[i] * (i == j)) for j in active] for i in active]
            solution = _solve(chosen, [right[i] for i in active])
            # Compared as their contributions to a typical step, because their units differ.
            parts = [cost * matrix[i][i] ** 0.5 for i, cost in zip(active, solution, strict=True)]
            if min(parts) >= 0.0:
                break
            del active[parts.index(min(parts))]
        self._costs = [0.0] * NUM_FEATURES
        for i, cost in zip(active, solution, strict=True):
            self._costs[i] = cost

    # ---------------------------------------------------------------- predicting

    def predict(self, shape: StepShape) -> float:
        """Returns the predicted duration of a step in milliseconds; 0 before the first observation."""
        c0, c1, c2, c3, c4, c5, c6, c7 = self._costs
        return (
            c0
            + c1 * shape.rows
            + c2 * self._experts(shape.rows + shape.prompt)
            + c3 * shape.decode_context
            + c4 * shape.prompt
            + c5 * shape.prompt_context
            + c6 * (shape.prompt > 0)
            + c7 * shape.prompt_span
        )

    def decode_ms(self, rows: float, context: int) -> float:
        """Returns the predicted duration of a step without prompt tokens, in milliseconds."""
        c0, c1, c2, c3 = self._costs[:PROMPT]
        return c0 + c1 * rows + c2 * self._experts(rows) + c3 * context

    def prefill_ms(self, tokens: int) -> float:
        """Returns the milliseconds that a prompt of `tokens` tokens takes in long chunks."""
        return self._costs[PROMPT] * tokens + self._costs[PROMPT_CONTEXT] * tokens * tokens / 2

    def recompute_ms(self, start: int, count: int, chunk: int) -> float:
        """Returns the milliseconds to compute `count` prompt tokens from position `start` on in steps of `chunk`
        tokens without other rows; 0 before the first observation."""
        steps = -(-count // chunk)
        each = self.predict(StepShape(prompt=min(count, chunk))) + self._costs[SPAN] * (start + count / 2)
        return steps * each + self._costs[PROMPT_CONTEXT] * chunk_context(start, count)

    def fixed_ms(self, rows: int) -> float:
        """Returns the part of a chunk's cost that does not depend on its size, in milliseconds, in a step with `rows`
        decode rows. It is the time to read the experts that the decode rows do not use, plus the fixed cost of a
        prompt; if rows is 0, also the constant cost of a step."""
        beyond = self._costs[EXPERTS] * (1.0 / self._share - self._experts(rows)) + self._costs[HAS_PROMPT]
        return beyond if rows else beyond + self._costs[0]

    def chunk_ms(self, before: int, start: int, count: int, *, span: int) -> float:
        """Returns the milliseconds by which a step grows if `count` prompt tokens from position `start` on join it.
        before: tokens already in the step; span: end position of its farthest chunk, 0 without prompt tokens."""
        more_experts = self._experts(before + count) - self._experts(before)
        return (
            self._costs[HAS_PROMPT] * (span == 0 and count > 0)
            + self._costs[SPAN] * max(start + count - span, 0) * (count > 0)
            + self._costs[EXPERTS] * more_experts
            + self._costs[PROMPT] * count
            + self._costs[PROMPT_CONTEXT] * chunk_context(start, count)
        )

    def largest_chunk(self, before: int, start: int, most: int, budget_ms: float, *, span: int) -> int:
        """Returns the largest number of prompt tokens, at most `most`, whose `chunk_ms` fits the budget."""
        if self.chunk_ms(before, start, most, span=span) <= budget_ms:
            return most
        low, high = 0, most  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.chunk_ms(before, start, middle, span=span) <= budget_ms:
                low = middle
            else:
                high = middle
        return low

    @property
    def spread(self) -> float:
        """The 99th percentile of actual / predicted: 99 of 100 steps take less than `predict` times this."""
        return self._spread

    @property
    def largest_trial(self) -> int:
        """The largest number of prompt tokens to plan beside decode rows; predictions for more tokens would extrapolate
        too far from measured steps."""
        return max(FIRST_CHUNK, GROWTH * self._largest_prompt)

    def _features(self, shape: StepShape) -> Vector:
        experts = self._experts(shape.rows + shape.prompt)
        contexts = [shape.decode_context, shape.prompt, shape.prompt_context]
        return [1.0, shape.rows, experts, *contexts, float(shape.prompt > 0), shape.prompt_span]

    def _experts(self, tokens: float) -> float:
        share = self._share
        unread: float = (1.0 - share) ** tokens
        return (1.0 - unread) / share


def chunk_context(start: int, count: int) -> int:
    """Returns the sum of the positions that `count` prompt tokens from position `start` on attend to."""
    return count * start + count * (count + 1) // 2


class _NormalEquations:
    """The normal equations for one kind of step. Features are divided by the duration, so the target is always 1.
    Only the upper triangle of the symmetric matrix is used."""

    def __init__(self) -> None:
        self.matrix: list[Vector] = [[0.0] * NUM_FEATURES for _ in range(NUM_FEATURES)]
        self.right: Vector = [0.0] * NUM_FEATURES

    def add(self, features: Vector, weight: float) -> None:
        keep = 1.0 - 1.0 / MEMORY
        end = NUM_FEATURES if features[PROMPT] else PROMPT  # of a kind without prompts the rest stays 0
        for i in range(end):
            scaled = weight * features[i]
            row = self.matrix[i]
            for j in range(i, end):
                row[j] = keep * row[j] + scaled * features[j]
            self.right[i] = keep * self.right[i] + scaled


def _solve(matrix: list[Vector], right: Vector) -> Vector:
    """Solves a linear system by Gaussian elimination without pivoting; the damped matrix is symmetric and positive
    definite. Reads only the upper triangle, and overwrites it and `right`."""
    size = len(right)
    for i, row in enumerate(matrix):
        for j in range(i + 1, size):
            factor = row[j] / row[i]
            if factor:
                below = matrix[j]
                for k in range(j, size):
                    below[k] -= factor * row[k]
                right[j] -= factor * right[i]
    solution = [0.0] * size
    for i in reversed(range(size)):
        row = matrix[i]
        solution[i] = (right[i] - sum(row[k] * solution[k] for k in range(i + 1, size))) / row[i]
    return solution
