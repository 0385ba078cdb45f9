"""Decides which models are loaded next, and which make room for them. Pure: time and memory are arguments.

Models wait in the order of their oldest requests, and a model overtakes another only if that does not delay the other.
Idle models make room first, including one that is still loading but whose clients have disconnected: those without
lines of batches before those with lines, and the longest idle ones first. A loaded model that becomes idle within its
turn is kept for GRACE_S. Then models make room whose turn is over. A turn begins when the load ends and lasts as long
as the load took, at least MIN_TURN_S, so that models under load serve for at least as long as they load. A model that
must make room after its turn finishes its running answers; its new requests wait behind the other models' requests.
Pinned models never make room.

Lines of batches come after all requests. While requests wait for an unloaded model that may be loaded now (after a
failed load it may not be at once), no model is loaded for lines. Otherwise a model is loaded for lines if memory is
free, or instead of models that have had no request for LINES_PATIENCE_S. A model with lines stays for LINES_TURN_S
after its turn, so that batches for several models take turns.

These rules bound the wait: while a model waits, each other model is loaded at most once, and not at all if it was
loaded when the wait began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from moeserve.front.memory import Memory

MIN_TURN_S: Final = 5.0
# Seconds that an idle model stays loaded within its turn: a client that sends one request after another would otherwise
# cause a load for each.
GRACE_S: Final = 1.0
LINES_PATIENCE_S: Final = 30.0  # seconds without a request after which a model makes room for lines
# Seconds after its turn that a model with lines stays loaded while lines wait for another.
LINES_TURN_S: Final = 120.0


class State(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    CLOSING = "closing"  # takes no new requests; its running ones end
    STOPPING = "stopping"  # its processes end


HOLDS_MEMORY: Final = frozenset(State) - {State.UNLOADED}


@dataclass(eq=False)
class ScheduledModel:
    """The fields that `pool.py` writes for the scheduler. Times are seconds of the pool's clock."""

    name: str
    is_pinned: bool = False  # never makes room for another
    need: Memory | None = None  # None: not known yet
    num_looks: int = 0  # looks at its file that must end before it is loaded
    state: State = State.UNLOADED
    running: int = 0  # requests at its server
    waiting_since: float | None = None  # when the oldest request that waits for the model came
    idle_since: float = 0.0  # the end of its last request, or of its load
    turn_ends: float = 0.0
    idle_limit: float | None = None  # seconds without a request after which it is unloaded; None: never
    retry_at: float = 0.0  # earliest time of the next load after a failed one
    is_unload_wanted: bool = False  # a request has asked for it
    num_lines: int = 0  # lines of batches at its server
    lines_since: float | None = None  # when the oldest line that waits for the model came
    lines_ended: float = 0.0  # the end of its last line
    is_held_elsewhere: bool = False  # an earlier server still uses one of its folders
    # It is CLOSING to make room for others, not because it was idle or because of a request.
    makes_room: bool = False

    @property
    def is_idle(self) -> bool:
        """True if no request runs on it or waits for it; lines of batches do not count. A model that is loading is idle
        if its clients have disconnected."""
        return not self.running and self.waiting_since is None

    @property
    def may_need(self) -> Memory | None:
        """Returns the memory that a load of the model would need; None while its file is looked at."""
        return None if self.num_looks else self.need

    @property
    def has_lines(self) -> bool:
        return bool(self.num_lines) or self.lines_since is not None


@dataclass
class Moves:
    load: list[ScheduledModel] = field(default_factory=list)
    close: list[ScheduledModel] = field(default_factory=list)  # to make room for others
    unload: list[ScheduledModel] = field(default_factory=list)  # idle for too long, or asked for
    # CLOSING models whose memory is no longer wanted.
    reopen: list[ScheduledModel] = field(default_factory=list)
    wake_at: float | None = None  # when to decide again if nothing changes before

    def __bool__(self) -> bool:
        return bool(self.load or self.close or self.unload or self.reopen)


def decide(models: Sequence[ScheduledModel], budget: Memory, now: float) -> Moves:
    """Returns the moves to make now. `budget` bounds the needs of all models that hold memory."""
    moves = Moves()
    times: list[float] = []
    for model in models:
        if model.state is State.LOADED and _is_due(model, now, times):
            moves.unload.append(model)
    waiting = [m for m in models if m.state is State.UNLOADED and m.waiting_since is not None]
    times += [m.retry_at for m in waiting if m.retry_at > now]
    waiting = [m for m in waiting if m.retry_at <= now and not m.is_held_elsewhere]
    waiting.sort(key=lambda m: m.waiting_since or 0.0)
    free = budget  # memory that no model holds
    coming = Memory(0)  # memory of models that are about to end
    for model in models:
        if model.state in HOLDS_MEMORY and model.need is not None:
            free = free.minus(model.need)
            if model.state in (State.CLOSING, State.STOPPING) or model in moves.unload:
                coming = coming.plus(model.need)
    if waiting:
        _load(moves, waiting, models, (free, free.plus(coming)), _stays_until, now, times)
    else:
        lines = [m for m in models if m.state is State.UNLOADED and m.lines_since is not None and m.may_need]
        times += [m.retry_at for m in lines if m.retry_at > now]
        lines = [m for m in lines if m.retry_at <= now and not m.is_held_elsewhere]
        lines.sort(key=lambda m: m.lines_since or 0.0)
        closing = [m for m in models if m.state is State.CLOSING and m.makes_room]
        moves.reopen = [m for m in closing if m.waiting_since is not None or not lines]
        if not moves.reopen:
            _load(moves, lines, models, (free, free.plus(coming)), _stays_for_lines, now, times)
    moves.wake_at = min(times, default=None)
    return moves


def room_beside_pinned(model: ScheduledModel, models: Iterable[ScheduledModel], budget: Memory) -> Memory:
    """Returns the part of the budget that the pinned models leave to the model."""
    for other in models:
        if other.is_pinned and other is not model and other.need is not None:
            budget = budget.minus(other.need)
    return budget


def _load(
    moves: Moves,
    waiting: Iterable[ScheduledModel],
    models: Sequence[ScheduledModel],
    room: tuple[Memory, Memory],
    stays_until: Callable[[ScheduledModel], float],
    now: float,
    times: list[float],
) -> None:
    """Adds to `moves` the loads of waiting models, in their order, and the models that make room. room: the memory that
    is free now, and the memory that is free when the models that are about to end have ended. Adds the ends of turns to
    `times`."""
    # promised: the free memory minus the needs of models that have waited longer.
    free, promised = room
    is_one_unknown = False
    for model in waiting:
        need = model.may_need
        if need is None:  # its file is being looked at: it is not overtaken for that
            is_one_unknown = True
            continue
        if need.fits(free) and need.fits(promised):
            moves.load.append(model)
            free = free.minus(need)
        elif not need.fits(promised):
            if is_one_unknown:
                break
            taken = [*moves.close, *moves.unload]
            victims = _victims(models, need.minus(promised), stays_until, now, taken, times)
            if victims is None:
                break  # the models after it wait
            moves.close += victims
            promised = promised.plus(_sum(victims))
        promised = promised.minus(need)


def _is_due(model: ScheduledModel, now: float, times: list[float]) -> bool:
    """Returns whether the model is to be unloaded now, because it has been idle for too long or a request has asked for
    it. Otherwise adds the time at which it will be idle for too long to `times`."""
    if model.is_unload_wanted:
        return True
    if not model.is_idle or model.has_lines or model.is_pinned or model.idle_limit is None:
        return False
    due = max(model.idle_since, model.lines_ended) + model.idle_limit
    if due > now:
        times.append(due)
    return due <= now


def _victims(
    models: Iterable[ScheduledModel],
    lacking: Memory,
    stays_until: Callable[[ScheduledModel], float],
    now: float,
    taken: Collection[ScheduledModel],
    times: list[float],
) -> list[ScheduledModel] | None:
    """Returns the models to unload so that `lacking` bytes become free; None if too few models may be unloaded now.
    stays_until: returns the time from which a model may be unloaded. Adds the end of the next turn to `times`."""
    candidates = [
        m
        for m in models
        if (m.state is State.LOADED or (m.state is State.LOADING and m.is_idle))
        and not m.is_pinned
        and m.need is not None
        and m not in taken
    ]
    may_go = [m for m in candidates if stays_until(m) <= now]
    times += [end for m in candidates if now < (end := stays_until(m)) < math.inf]
    idle = sorted((m for m in may_go if m.is_idle), key=lambda m: (m.has_lines, m.idle_since))
    busy = sorted((m for m in may_go if not m.is_idle), key=lambda m: m.turn_ends)
    chosen: list[ScheduledModel] = []
    for model in (*idle, *busy):
        if lacking.fits(_sum(chosen)):
            break
        chosen.append(model)
    if not lacking.fits(_sum(chosen)):
        return None
    # The last chosen model is needed; smaller models before it may not be.
    for model in reversed(chosen[:-1]):
        others = [other for other in chosen if other is not model]
        if lacking.fits(_sum(others)):
            chosen = others
    return chosen


def _stays_until(model: ScheduledModel) -> float:
    """Returns the time from which the model may be unloaded for others."""
    if model.state is State.LOADING:  # an idle model that is loading: its clients have disconnected
        return 0.0
    return min(model.turn_ends, model.idle_since + GRACE_S) if model.is_idle else model.turn_ends


def _stays_for_lines(model: ScheduledModel) -> float:
    """Returns the time from which the model may be unloaded for lines of batches that wait for another."""
    if model.state is State.LOADING or not model.is_idle:
        return math.inf
    turn_ends = model.turn_ends + LINES_TURN_S
    if not model.has_lines:
        turn_ends = min(turn_ends, model.lines_ended + GRACE_S)  # its next line may be about to come
    return max(model.idle_since + LINES_PATIENCE_S, turn_ends)


def _sum(models: Iterable[ScheduledModel]) -> Memory:
    total = Memory(0)
    for model in models:
        assert model.need is not None
        total = total.plus(model.need)
    return total
