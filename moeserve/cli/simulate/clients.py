"""The clients in virtual time: when they send requests, and the latencies that they observe."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from moeserve.cli.simulate.connections import At, Connections
from moeserve.cli.simulate.worker import ANSWER_ID, STOP_ID
from moeserve.cli.workload.metrics import Outcome
from moeserve.cli.workload.prompts import TokenHistory
from moeserve.cli.workload.trace import Workload
from moeserve.messages.sampling import SamplingParams, TextOptions
from moeserve.messages.schema import GenerateRequest, RequestError, TokensItem


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended yet."""

    outcome: Outcome
    session: int
    turn: int
    last: float | None = None  # virtual time of the latest tokens, in seconds


class Clients:
    """Plays the sessions of a workload, as `bench.load.Load` does in real time. Every turn ends, with an answer or an
    error."""

    def __init__(
        self,
        workload: Workload,
        at: At,
        send: Callable[[GenerateRequest, float], None],
        max_concurrency: int | None,
        max_tokens: int | None,
        on_end: Callable[[], object],
        connect: float = 0.0,
    ) -> None:
        """`send`: called with each request when it leaves the client. `max_concurrency`: limit of open requests; None:
        no limit. `max_tokens`: of every request; None: the length that its answer will have. `on_end`: called when a
        request ends. `connect`: seconds that opening a connection takes."""
        self._workload = workload
        self._at = at
        self._connections = Connections(connect, at, send)
        self._num_free = max_concurrency if max_concurrency is not None else workload.num_requests
        self._max_tokens = max_tokens
        self._on_end = on_end
        self._histories: dict[int, TokenHistory] = {}  # histories of the open sessions
        self._waiting: deque[tuple[int, int]] = (
            deque()
        )  # (session, turn) that wait because of max_concurrency
        self._open: dict[int, OpenRequest] = {}
        self.output_lens: dict[int, int] = {}  # answer lengths of open requests, for the worker
        self.outcomes: list[Outcome] = []
        for number, session in enumerate(workload.sessions):
            at(session.arrival, partial(self._ask, number, 0))

    @property
    def num_open(self) -> int:
        return len(self._open) + len(self._waiting)

    def _ask(self, session: int, turn: int, now: float) -> None:
        if self._num_free == 0:
            self._waiting.append((session, turn))
            return
        self._num_free -= 1
        self._begin(session, turn, now)

    def _start_next(self, now: float) -> None:
        if self._waiting:
            self._begin(*self._waiting.popleft(), now)
        else:
            self._num_free += 1

    def _begin(self, session: int, turn: int, now: float) -> None:
        if turn == 0:
            self._histories[session] = TokenHistory(self._workload, session)
        wanted = self._workload.sessions[session].turns[turn]
        prompt = self._histories[session].prompt(turn)
        request_id = len(self.outcomes) + 1
        outcome = Outcome(sent=now, prompt_len=len(prompt))
        self.outcomes.append(outcome)
        self._open[request_id] = OpenRequest(outcome, session, turn)
        self.output_lens[request_id] = wanted.output_len
        sampling = SamplingParams(
            max_tokens=self._max_tokens or wanted.output_len, seed=request_id, stop_token_ids=(STOP_ID,)
        )
        request = GenerateRequest(request_id, prompt.tobytes(), sampling, TextOptions(), now)
        self._connections.ask(request, now)

    def item(self, item: TokensItem, now: float) -> None:
        """Takes new tokens of an answer, or its end, at virtual time `now`."""
        entry = self._open[item.id]
        outcome = entry.outcome
        if item.token_ids or item.stop_token is not None:
            if entry.last is not None:
                outcome.itls.append(now - entry.last)
            else:
                outcome.ttft = now - outcome.sent
            entry.last = now
        if item.usage is not None:
            outcome.output_len = item.usage.completion_tokens
            outcome.cached_tokens = item.usage.cached_tokens
            outcome.latency = now - outcome.sent
            answer = np.full(outcome.output_len, ANSWER_ID, np.int32)
            if item.stop_token is not None:
                answer[-1] = item.stop_token
            self._histories[entry.session].answered(answer)
            self._close(item.id, now)

    def error(self, message: RequestError, now: float) -> None:
        """Takes the error that ends a request, at virtual time `now`."""
        self._open[message.id].outcome.error = message.message
        self._close(message.id, now)

    def _close(self, request_id: int, now: float) -> None:
        """Ends a request: a waiting one may start, and the session continues or, after an error, ends."""
        entry = self._open.pop(request_id)
        del self.output_lens[request_id]
        self._connections.ended()
        self._on_end()
        self._at(now, self._start_next)
        turns = self._workload.sessions[entry.session].turns
        following = entry.turn + 1
        if entry.outcome.error:
            for skipped in turns[following:]:
                self.outcomes.append(
                    Outcome(now, skipped.input_len, error="not sent: the turn before failed")
                )
                self._on_end()
            following = len(turns)
        if following == len(turns):
            del self._histories[entry.session]
            return
        when = max(turns[following].not_before, now + turns[following].think)
        self._at(when, partial(self._ask, entry.session, following))
