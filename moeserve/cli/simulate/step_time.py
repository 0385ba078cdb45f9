"""The step-time model: the duration of a step from its content.

    seconds = base(tokens in the step)
            + decode_context x (KV positions that decode rows read)
            + decode_span    x (of these, the most that one row reads)
            + prefill_pairs  x (pairs of a prompt token and a position that it reads)
            + sampled_row    x (rows that sample)
            + sampling       if any row samples
            + prompt         if the step has prompt tokens
            + prompt_span    x (the position at which its farthest chunk of a prompt ends)

Steps without prompts have a `base` of their own, which contains the rows' sampling. On a GPU such steps run other
kernels, in a CUDA graph, and a row costs less than a prompt's token that samples. In steps with prompts a decode row
counts as one more token, or costs what it costs alone (`adds_rows`), as on a GPU. The fit takes the form that is nearer
to the measured steps.

`base` is piecewise linear through measured points: between one token and a full step it bends where all experts'
weights are read anyway and the step becomes compute-bound. The next terms are linear: attention and the vocabulary
projection, whose weights are read once for all rows that sample. Both spans and `prompt` are those of a GPU; the
prompt's are as in the router's own model (`router/core/policy/step_cost.py`). Prompts take other kernels than decode
rows, and a few tokens far into a prompt walk over all keys before them as slowly as many. One decode row far into its
answer occupies a part of a GPU: positions cost less where many rows read them.

If the worker launches ahead, the `base` of decode rows holds for steps that are launched while the step before is
computed. A step that is launched later takes `launch` longer: the time that the host needs before the GPU begins.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from moeserve.errors import UserError
from moeserve.messages.steps import MeasuredStep, StepPlan

NotNegative = Annotated[float, Meta(ge=0, le=1e6)]


class StepTimeError(UserError):
    """The file is not a step-time model; the message says where and why."""


class StepLoad(NamedTuple):
    """The features of a step on which its duration depends: numbers of tokens, positions, pairs and rows."""

    tokens: int
    decode_context: int
    prefill_pairs: int
    sampled_rows: int
    has_prompt: int = 0  # 1: the step has prompt tokens
    prompt_span: int = 0  # the farthest position at which a chunk ends
    decode_rows: int = 0
    decode_span: int = 0  # the most positions that one decode row reads

    @property
    def without_rows(self) -> StepLoad:
        """Returns the load without its decode rows and the positions that they read."""
        rows = self.decode_rows
        left = self._replace(tokens=self.tokens - rows, sampled_rows=self.sampled_rows - rows)
        return left._replace(decode_context=0, decode_rows=0, decode_span=0)

    @property
    def is_decode(self) -> bool:
        """Returns whether the step has decode rows only, all of which sample."""
        return not self.has_prompt and not self.prefill_pairs and self.sampled_rows == self.tokens > 0


def load_of(plan: StepPlan) -> StepLoad:
    """Returns the features of a plan."""
    tokens = context = pairs = sampled = span = decoding = longest = 0
    for row in plan.rows:
        count, start = row.count, row.start
        tokens += count
        sampled += row.sample
        if count == 1:
            context += start + 1
            decoding += 1
            longest = max(longest, start + 1)
        else:
            pairs += count * start + count * (count + 1) // 2
            span = max(span, start + count)
    return StepLoad(tokens, context, pairs, sampled, int(span > 0), span, decoding, longest)


class StepTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model as stored in a JSON file. Times are in seconds. Raises ValueError when points are missing or out of
    order."""

    source: str  # the model, the machine, and how they were measured
    tokens: Annotated[list[int], Meta(min_length=2)]  # the points of `base`, ascending
    seconds: Annotated[list[NotNegative], Meta(min_length=2)]  # values of `base` at these points
    decode_context: NotNegative = 0.0
    prefill_pairs: NotNegative = 0.0
    sampled_row: NotNegative = 0.0
    prompt: NotNegative = 0.0
    prompt_span: NotNegative = 0.0
    num_experts: int = 0  # of a layer; part of the virtual worker's WorkerReady
    experts_per_token: int = 0
    # What the measured worker told its router: the most tokens of its steps (0: as on a CPU), and whether prompts
    # come first where nothing else is asked for.
    step_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    prompts_first: bool = False
    # The points of steps of decode rows alone, their sampling included; none: they are as other steps.
    decode_rows: list[int] = []
    decode_seconds: list[NotNegative] = []
    adds_rows: bool = (
        False  # decode rows beside prompts cost as much as alone; else they count as tokens of the step
    )
    decode_span: NotNegative = 0.0
    sampling: NotNegative = 0.0
    # Of a worker that runs ahead. The most tokens of a step with prompts that is launched behind the one before; decode
    # rows alone always are. 0: no step is.
    ahead_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    launch: NotNegative = 0.0
    # The cost of steps that the measured worker reported to its router before the first request; none on a CPU.
    measured_steps: list[MeasuredStep] = []

    def __post_init__(self) -> None:
        _check("tokens", self.tokens, "seconds", self.seconds)
        if self.decode_rows or self.decode_seconds:
            _check("decode_rows", self.decode_rows, "decode_seconds", self.decode_seconds)
        if any(min(msgspec.structs.astuple(step)) < 0 for step in self.measured_steps):
            raise ValueError("`measured_steps` must not be negative")

    def base(self, tokens: int) -> float:
        """Returns `base` in seconds. Beyond the measured points, the first or last segment is extrapolated."""
        return _interpolated(tokens, self.tokens, self.seconds)

    def of(self, load: StepLoad) -> float:
        """Returns the duration of a step in seconds."""
        if self.decode_rows and (load.is_decode or (self.adds_rows and load.decode_rows)):
            count = load.tokens if load.is_decode else load.decode_rows
            alone = _interpolated(count, self.decode_rows, self.decode_seconds)
            rows = alone + self._of_contexts(load)
            return rows if load.is_decode else rows + self.of(load.without_rows)
        return (
            self.base(load.tokens)
            + self._of_contexts(load)
            + self.prefill_pairs * load.prefill_pairs
            + self.sampled_row * load.sampled_rows
            + self.sampling * (load.sampled_rows > 0)
            + self.prompt * load.has_prompt
            + self.prompt_span * load.prompt_span
        )

    def _of_contexts(self, load: StepLoad) -> float:
        return self.decode_context * load.decode_context + self.decode_span * load.decode_span


def _check(sizes_name: str, sizes: list[int], times_name: str, times: list[float]) -> None:
    if len(sizes) != len(times):
        raise ValueError(f"`{sizes_name}` and `{times_name}` must have the same length")
    if len(sizes) < 2:
        raise ValueError(f"`{sizes_name}` must have length >= 2")
    if sizes[0] < 0 or any(a >= b for a, b in itertools.pairwise(sizes)):
        raise ValueError(f"`{sizes_name}` must ascend")
    if any(a > b for a, b in itertools.pairwise(times)):
        raise ValueError(f"`{times_name}` must not descend")


def _interpolated(size: int, sizes: list[int], times: list[float]) -> float:
    right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    x0, x1 = sizes[right - 1], sizes[right]
    y0, y1 = times[right - 1], times[right]
    return max(y0 + (size - x0) * (y1 - y0) / (x1 - x0), 0.0)


def read_step_time(path: Path) -> StepTime:
    """Reads a model. Raises StepTimeError for a malformed file, OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StepTime)
    except msgspec.DecodeError as error:
        raise StepTimeError(f"{path}: {error}") from None


def write_step_time(path: Path, model: StepTime) -> None:
    """Writes a model as JSON. Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n")
