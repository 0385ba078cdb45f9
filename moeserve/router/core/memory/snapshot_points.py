"""Where a prompt is cut so that a snapshot of its recurrent state can be taken: at the ends of chunks.

A cut costs a step, so there are few. What comes next is one of these:

- The next turn of the conversation. Chat templates render the end of a prompt again: the generation prompt
  (`<|im_start|>assistant`, a line break, perhaps an open or empty `<think>` part) is followed by the answer, but where
  the template drops the reasoning of earlier answers, what follows differs from the tokens that were computed. The last
  point is some tokens before the prompt's end, in front of all that. Where the answer is continued as it is, the state
  that the request leaves at its end serves.
- Another prompt that began like this one: a shared system prompt, an edited last message. The tree knows how far this
  prompt matches an earlier one; a second one that departs there makes a third likely, so that is a point (as in
  Marconi, arXiv:2411.19379).
- The first edit of a message, whose place is not known. Points at distances from the last one that double each time
  bound what is computed again to about twice the edited part, for a logarithm of the prompt's length in snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.router.core.memory.radix_node import SnapshotKind

SnapshotPoint = tuple[int, SnapshotKind]  # (position, kind)


@dataclass(frozen=True, slots=True)
class SnapshotSpacing:
    """Distances in tokens."""

    tail: int = 8  # from the last point to the prompt's end; Qwen's longest generation prompt has 7 tokens
    least: int = 64  # between two points: a snapshot that would save fewer is not worth a step
    first: int = 512  # between the last point and the one before; the next distances are twice as long each
    is_even: bool = False  # all distances are `first`: where a point costs no step
    # Points are multiples of it: of a page's tokens, where states are kept in a tier with their pages.
    align: int = 1


DEFAULT_SPACING = SnapshotSpacing()


def snapshot_spacing(max_num_batched_tokens: int) -> SnapshotSpacing:
    """Points of a long prompt lie at least a step's tokens apart: it takes several steps anyway, so that they cost
    little."""
    return SnapshotSpacing(first=max(DEFAULT_SPACING.first, max_num_batched_tokens))


def window_spacing(window: int) -> SnapshotSpacing:
    """The spacing of window segments of windowed layers. They cost no step, and take a quarter of a prompt's windowed
    KV. So where nothing else is left of them, a prompt that departs from an earlier one computes at most four windows
    again."""
    return SnapshotSpacing(least=min(DEFAULT_SPACING.least, window), first=4 * window, is_even=True)


def snapshot_points(
    start: int, matched: int, num_prompt: int, spacing: SnapshotSpacing
) -> list[SnapshotPoint]:
    """The points of a prompt of `num_prompt` tokens, in ascending order. It continues from the snapshot at `start`; the
    tree has the KV of its first `matched` tokens."""
    align = spacing.align
    last = (num_prompt - spacing.tail) // align * align
    matched = matched // align * align
    points: list[SnapshotPoint] = []

    def add(position: int, kind: SnapshotKind) -> None:
        taken = [start, *(at for at, _ in points)]
        if position > start and all(abs(position - at) >= spacing.least for at in taken):
            points.append((position, kind))

    if start < matched <= last:
        add(matched, SnapshotKind.BRANCH)
    if start < last:
        add(last, SnapshotKind.PROMPT)
    distance = spacing.first
    while start < last - distance:
        add((last - distance) // align * align, SnapshotKind.SPACED)
        distance += spacing.first if spacing.is_even else distance
    return sorted(points, key=lambda point: point[0])
