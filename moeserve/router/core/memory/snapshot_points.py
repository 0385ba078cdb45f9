"""Chooses the positions in a prompt at which snapshots of recurrent state are taken; a chunk must end at each.

A chunk boundary costs a step, so points are few. Each anticipates a possible later request:

- The next turn of the conversation. Chat templates re-render the end of a prompt: the generation prompt
  (`<|im_start|>assistant`, a line break, perhaps an open or empty `<think>` part) precedes the answer; if the template
  drops the reasoning of earlier answers, the tokens after it differ next time. So the last point is some tokens before
  the prompt's end, where the generation prompt has not begun yet. If the answer is kept verbatim, the state that the
  request leaves at its end is used instead. A prompt that continues from the last point of the turn before shows that
  answers are not kept. The next turn will continue there too, so the last point may then be near the point before.
- Another prompt with the same beginning: a shared system prompt, or an edited last message. The tree knows where this
  prompt diverges from an earlier one. A third prompt is likely to diverge there as well, so this is a point (as in
  Marconi, arXiv:2411.19379).
- An edited message, at an unknown position. Points at doubling distances from the last one limit recomputation to about
  twice the edited part, and need only logarithmically many snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.router.core.memory.radix_node import SnapshotKind

SnapshotPoint = tuple[int, SnapshotKind]  # (position, kind)


@dataclass(frozen=True, slots=True)
class SnapshotSpacing:
    """Distances between snapshot points, in tokens."""

    tail: int = 8  # from the last point to the prompt's end; Qwen's longest generation prompt has 7 tokens
    least: int = 64  # between two points; a snapshot that saves fewer tokens is not worth a step
    turn: int = 16  # the same of the last point of a prompt whose next turn is likely to continue from it
    first: int = 512  # between the last point and the one before; further distances double
    is_even: bool = False  # all distances are `first`; for points that cost no step
    # Points are multiples of this: the tokens of a page, if a tier stores states along with pages.
    align: int = 1


DEFAULT_SPACING = SnapshotSpacing()


def snapshot_spacing(max_num_batched_tokens: int) -> SnapshotSpacing:
    """Returns the spacing of snapshot points in a prompt: the first ones are at least a step's tokens apart. A prompt
    that is longer than a step takes several steps anyway, so points at their ends cost little."""
    return SnapshotSpacing(first=max(DEFAULT_SPACING.first, max_num_batched_tokens))


def window_spacing(window: int) -> SnapshotSpacing:
    """Returns the spacing of window segments. They cost no step and take a quarter of a prompt's windowed KV. A
    prompt that diverges from an earlier one recomputes at most four windows if only segments are left of it."""
    return SnapshotSpacing(least=min(DEFAULT_SPACING.least, window), first=4 * window, is_even=True)


def snapshot_points(
    start: int, matched: int, num_prompt: int, spacing: SnapshotSpacing, *, follows_prompt: bool = False
) -> list[SnapshotPoint]:
    """Returns the points of a prompt of `num_prompt` tokens, ascending. start: position of the snapshot that it
    continues from; matched: number of its leading tokens whose KV the tree has. follows_prompt: that snapshot is the
    last point of an earlier prompt."""
    align = spacing.align
    last = (num_prompt - spacing.tail) // align * align
    matched = matched // align * align
    points: list[SnapshotPoint] = []

    def add(position: int, kind: SnapshotKind, least: int = spacing.least) -> None:
        taken = [start, *(at for at, _ in points)]
        if position > start and all(abs(position - at) >= least for at in taken):
            points.append((position, kind))

    if start < matched <= last:
        add(matched, SnapshotKind.BRANCH)
    if start < last:
        add(last, SnapshotKind.PROMPT, spacing.turn if follows_prompt else spacing.least)
    distance = spacing.first
    while start < last - distance:
        add((last - distance) // align * align, SnapshotKind.SPACED)
        distance += spacing.first if spacing.is_even else distance
    return sorted(points, key=lambda point: point[0])
