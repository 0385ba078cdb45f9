"""Makes requests with expensive grammars take turns, so that steps do not wait for their token masks.

One thread of the worker computes masks beside the step. Cheap rows are never held back. An expensive row is planned
when there is credit for it: each step adds its duration as credit, because the thread works meanwhile, and a row spends
the time that its last mask took. So the thread keeps up, and masks are ready when a step needs them. Among the
expensive rows, those of the API key that has spent least come first; among the rows of one key, the row that has waited
longest.

The thread takes a core from the steps, whose CPU threads wait for one another. So beside rows of another key, which
would pay for it, masks get only SHARE_BESIDE_OTHERS of a step.

On a busy machine the thread gets less than a core, and steps wait for late masks. A late row keeps its previous
cost. Each step with a late row halves the credit that steps beside another key's rows add, down to what the thread
can do; the other steps slowly raise it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from moeserve.router.core.request import Request, State

MOST_CREDIT_MS: Final = 20.0
SHARE_BESIDE_OTHERS: Final = 0.25
LEAST_PACE: Final = 1 / 64
RECOVERY: Final = 1.02  # factor per step without late rows
MOST_DEBT_MS: Final = 200.0  # debt limit if only expensive rows run, which continue regardless


class GrammarTurns:
    """Chooses the rows with grammars. A request that is left out of a step is planned in a later one without further
    effects."""

    def __init__(self) -> None:
        # request → milliseconds of its last mask; the longest waiting first
        self._costly: dict[Request, float] = {}
        # Milliseconds spent per tenant, while there are expensive requests.
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._credit_ms = 0.0
        self._pace = 1.0  # fraction of its share that the thread achieves

    def observe(
        self,
        owners: Sequence[Request],
        mask_ms: Mapping[int, float],
        step_ms: float,
        late: Collection[int] = (),
    ) -> None:
        """Takes a step's result. owners: the requests of its sampling rows; mask_ms: costs of some masks, by row index;
        late: indices of rows whose mask was late."""
        if not self._costly and not mask_ms:
            return
        is_behind = any(owners[index] in self._costly for index in late)
        for index, request in enumerate(owners):
            if index in mask_ms:
                self._costly[request] = mask_ms[index]
            elif index not in late:
                self._costly.pop(request, None)
        for request in [request for request in self._costly if request.state is State.FINISHED]:
            del self._costly[request]
        self._pace = max(self._pace / 2, LEAST_PACE) if is_behind else min(self._pace * RECOVERY, 1.0)
        share = SHARE_BESIDE_OTHERS * self._pace if self._costs_another(owners) else 1.0
        self._credit_ms = min(self._credit_ms + step_ms * share, MOST_CREDIT_MS)
        if not self._costly:
            self._spent.clear()
            self._pace = 1.0

    def _costs_another(self, owners: Sequence[Request]) -> bool:
        """Returns whether some key has rows but no expensive ones, and so would pay for other keys' masks."""
        tenants = {request.tenant for request in self._costly}
        return any(request.tenant not in tenants for request in owners)

    def select(self, decoding: Sequence[Request]) -> Sequence[Request]:
        """Returns the requests that get a row in the next step; at least one."""
        if not self._costly:
            return decoding
        chosen = [request for request in decoding if request not in self._costly]
        among = set(decoding)
        waiting = [request for request in self._costly if request in among]
        while waiting and (self._credit_ms > 0.0 or not chosen):
            request = min(waiting, key=lambda request: self._spent[request.tenant])
            waiting.remove(request)
            cost = self._costly.pop(request)
            self._costly[request] = cost  # moves to the end of the queue
            self._credit_ms = max(self._credit_ms - cost, -MOST_DEBT_MS)
            self._spent[request.tenant] += cost
            chosen.append(request)
        return chosen
