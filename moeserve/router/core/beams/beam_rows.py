r"""The request slots and KV slots of a running beam search.

The prompt is the request's own and is computed as usual. After it, each beam has a path of KV slots, and beams share
the slots of common tokens:

    prompt (Request.slots) --- a --- b --- c      beam 0: a b c
                                \     `--- d      beam 1: a b d
                                 `-- e --- f      beam 2: a e f

A node of a path is one KV slot with a reference count of the beams and nodes after it. A fork increments it, a
dropped beam decrements it, and a slot without references is freed. KV is never copied, because slots hold single
tokens. In models with recurrent state a fork copies the state.

The best continuation of a beam keeps the beam's request slot. The others take request slots of dropped beams, so no
slot is overwritten before it is read.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from moeserve.messages.beams import BeamParams
from moeserve.messages.sampling import SamplingParams, TokenLogprob
from moeserve.messages.steps import Fork
from moeserve.router.core.beams.beam_search import BeamSearch


class PathNode:
    """The KV slot of one token, shared by one or more beams."""

    __slots__ = ("before", "refs", "slot", "window_slot")

    def __init__(self, before: PathNode | None, slot: int, window_slot: int) -> None:
        self.before = before  # takes over the beam's reference to `before`
        self.slot = slot
        self.window_slot = window_slot  # in the windowed layers' pool; -1: no such pool, or freed
        self.refs = 1


class BeamRow:
    """A beam's row in the current or the next step."""

    __slots__ = ("path", "req_slot", "source", "token_id")

    def __init__(self, req_slot: int, source: int, token_id: int, path: PathNode | None) -> None:
        self.req_slot = req_slot
        self.source = source  # request slot of the beam that it continues
        self.token_id = token_id  # the beam's last token, which the row computes
        self.path = path  # planned tokens after the prompt


class BeamRows:
    """The rows of a running beam search. RunningBatch binds it, KvMemory frees its slots."""

    def __init__(self, params: BeamParams, sampling: SamplingParams, num_prompt: int) -> None:
        self.width = params.width
        self.search = BeamSearch(params, sampling)
        self.choice_ids: tuple[
            int, ...
        ] = ()  # client requests, in the order of the answers' rank; written by BeamSearches
        self.req_slots: list[int] = []  # the request's own first; written by RunningBatch
        # State slots of all req_slots except the first; -1: none. Written by KvMemory.
        self.more_state_slots = [-1] * (params.width - 1)
        self.num_slots = 0  # KV slots of all paths together
        # True: rows of the beams are to be planned. False: the prompt's rows are, or results are awaited.
        self.is_due = False
        self.rows: list[BeamRow] = []
        self._num_prompt = num_prompt
        self._in_window: deque[list[PathNode]] = deque()  # nodes of the last positions, one list per step
        self._freed_windows = array("i")

    @property
    def position(self) -> int:
        """The position of the tokens that the next rows compute."""
        return self._num_prompt + self.search.length - 1

    def bound(self, req_slots: list[int]) -> None:
        """Starts the search anew after the request was bound; its prompt is computed first."""
        self.req_slots = req_slots
        self.rows = [BeamRow(req_slots[0], req_slots[0], -1, None)]

    def advance(self, tops: Sequence[TokenLogprob]) -> tuple[array[int], list[tuple[int, int]]]:
        """Advances the search by the top tokens of each row. Returns the KV slots without a beam, for the caller to
        free, and the forks as request slots (source, target). Rows are then due, unless the search is over."""
        before, continued = self.rows, self.search.advance(tops)
        stays = {one.row for one in continued}
        in_use = {before[row].req_slot for row in stays}
        given_up = [slot for slot in self.req_slots if slot not in in_use]
        self.rows, forks = [], []
        for row, token_id in continued:
            beam = before[row]
            target = beam.req_slot
            if row in stays:
                stays.remove(row)
            else:
                target = given_up.pop()
                forks.append((beam.req_slot, target))
            if beam.path is not None:
                beam.path.refs += 1
            self.rows.append(BeamRow(target, beam.req_slot, token_id, beam.path))
        self.is_due = bool(self.rows)
        return self._leave(before), forks

    def plan(self, slots: array[int], window_slots: array[int] | None = None) -> list[Fork]:
        """Assigns each row its KV slot and, if there is such a pool, its slot of the windowed layers. Returns the
        forks that the worker makes before the rows."""
        self.is_due = False
        self.num_slots += len(slots)
        of_window = [-1] * len(slots) if window_slots is None else window_slots
        planned = []
        for row, slot, window_slot in zip(self.rows, slots, of_window, strict=True):
            row.path = PathNode(row.path, slot, window_slot)
            planned.append(row.path)
        if window_slots is not None:
            self._in_window.append(planned)
        return [Fork(row.req_slot, row.source, self.position, row.token_id) for row in self.rows]

    def stop(self) -> array[int]:
        """Drops all beams and resets the search to its start. Returns their KV slots, for the caller to free."""
        rows, self.rows = self.rows, []
        self.is_due = False
        self.search.restart()
        self._in_window.clear()
        return self._leave(rows)

    def drop_windows(self, count: int) -> list[int]:
        """Returns the window slots of all planned positions except the last `count`; no later row reads them, and
        the caller frees them."""
        dropped = []
        while len(self._in_window) > count:
            nodes = [node for node in self._in_window.popleft() if node.window_slot >= 0]
            dropped += [node.window_slot for node in nodes]
            for node in nodes:
                node.window_slot = -1
        return dropped

    def take_freed_windows(self) -> array[int]:
        """Returns the window slots freed by `advance` and `stop`, which the caller returns to the pool."""
        freed, self._freed_windows = self._freed_windows, array("i")
        return freed

    def _leave(self, rows: Sequence[BeamRow]) -> array[int]:
        freed = array("i")
        for row in rows:
            path = row.path
            while path is not None:
                path.refs -= 1
                if path.refs:
                    break
                freed.append(path.slot)
                if path.window_slot >= 0:
                    self._freed_windows.append(path.window_slot)
                    path.window_slot = -1
                path = path.before
        self.num_slots -= len(freed)
        return freed

    def held_slots(self) -> Iterator[int]:
        """Yields the KV slots of all paths, each once."""
        return (path.slot for path in self._paths())

    def held_windows(self) -> list[int]:
        """Returns the window slots of all paths, each once."""
        return [path.window_slot for path in self._paths() if path.window_slot >= 0]

    def _paths(self) -> Iterator[PathNode]:
        seen: set[PathNode] = set()
        for row in self.rows:
            path = row.path
            while path is not None and path not in seen:
                seen.add(path)
                yield path
                path = path.before
