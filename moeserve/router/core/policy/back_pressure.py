"""Back-pressure: limits the queue in requests and tokens, and tells refused clients when to retry.

With API keys, each key may fill only a share of the queue: 1 / (n + 1) of it while n keys have open requests, so
that a further key always finds room. The `Retry-After` of a 503 is the predicted time for the queued work, by the
learnt cost of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized

from moeserve.messages.refusal import Refusal
from moeserve.messages.schema import BACKGROUND_PRIORITY, GenerateRequest, RequestError
from moeserve.router.core.batch.output_history import OutputHistory
from moeserve.router.core.batch.waiting_queue import WaitingQueue
from moeserve.router.core.limits import Limits
from moeserve.router.core.policy.step_cost import StepCost, StepShape
from moeserve.router.core.request import INT32_BYTES, Request

LEAST_WAIT_S, MOST_WAIT_S = 1, 600


class BackPressure:
    def __init__(
        self,
        limits: Limits,
        waiting: WaitingQueue,
        running: Mapping[int, Request],
        cost: StepCost,
        history: OutputHistory,
        postponed: Sized,
    ) -> None:
        """running: the batch, owned by others. postponed: requests that will return to the queue."""
        self._limits = limits
        self._waiting = waiting
        self._running = running
        self._cost = cost
        self._history = history
        self._postponed = postponed

    def refusal(self, message: GenerateRequest, num_tenants: int) -> RequestError | None:
        """Returns the error, with status 503, for a request that finds the queue full; None if it is accepted.
        num_tenants: API keys with open requests, including this one's. An empty queue accepts a prompt of any length.
        Background requests are never refused here: httpserver limits them."""
        if message.priority == BACKGROUND_PRIORITY:
            return None  # httpserver bounds how many are open
        limits, waiting = self._limits, self._waiting
        tokens = waiting.num_tokens + len(message.token_ids) // INT32_BYTES
        share = limits.max_num_queued_reqs
        if message.key_name:
            share = max(share // (num_tenants + 1), 1)
        if (num_waiting := waiting.num_others + len(self._postponed)) >= limits.max_num_queued_reqs:
            refusal = Refusal.QUEUE_FULL
            cause = f"{num_waiting} requests are waiting already"
        elif waiting.num_others and tokens > limits.max_num_queued_tokens:
            refusal = Refusal.QUEUE_FULL
            cause = f"requests with {waiting.num_tokens} prompt tokens are waiting already"
        elif waiting.of_tenant(message.key_name) >= share:
            refusal = Refusal.QUOTA
            cause = f"{waiting.of_tenant(message.key_name)} requests of this API key are waiting already"
        else:
            return None
        wait = self.predicted_wait_s()
        text = f"the server is busy: {cause}; try again in {wait} s"
        return RequestError(id=message.id, status=503, message=text, retry_after=wait, refusal=refusal)

    def predicted_wait_s(self) -> int:
        """Returns the predicted whole seconds until all requests that run or wait now are finished, assuming that as
        many run at once as do now: the KV pool may hold fewer than there are request slots."""
        running = self._running.values()
        rows = max(len(running), 1)
        context = sum(len(request.slots) for request in running)
        row_ms = self._cost.predict(StepShape(rows=rows, decode_context=context)) / rows
        so_far = [request.num_output for request in running]
        length = max(self._history.mean, sum(so_far) / rows)
        left = sum(max(length - tokens, 0.0) for tokens in so_far)
        ms = self._cost.prefill_ms(1) * self._waiting.num_tokens
        ms += row_ms * (left + length * self._waiting.num_others)
        return min(max(math.ceil(ms / 1e3), LEAST_WAIT_S), MOST_WAIT_S)
