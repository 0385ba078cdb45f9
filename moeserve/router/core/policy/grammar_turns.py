"""Requests whose grammars take long take turns, so that the others' steps do not wait for their masks.

A mask is made by one thread of the worker, beside the step. What costs little is never held back. A costly row is
planned when there is credit for it: a step gives as much as it lasted, because the thread makes masks meanwhile, and a
row takes what its last mask took. So the thread keeps up, and its masks are there when a step wants them. Of the costly
rows, that of the key which has taken least comes first, then the one that has waited longest.

That thread takes a core from the steps, on which the CPU engine's threads wait for one another. So beside rows of
another key, which pays for it, masks get SHARE_BESIDE_OTHERS of a step.

On a busy machine the thread gets less of a core than that, and masks are late, for which steps wait. A late row stays
as costly as it was. Each step with one halves what steps beside another key's rows give, down to what the thread can
do; the others slowly raise it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from moeserve.router.core.request import Request, State

MOST_CREDIT_MS: Final = 20.0
SHARE_BESIDE_OTHERS: Final = 0.25
LEAST_PACE: Final = 1 / 64
RECOVERY: Final = 1.02  # of a step without late rows
MOST_DEBT_MS: Final = 200.0  # where nothing but costly rows runs, which then go on all the same


class GrammarTurns:
    """A request that is not planned in a step is planned in a later one as if nothing had been."""

    def __init__(self) -> None:
        self._costly: dict[Request, float] = {}  # milliseconds of its last mask; who waits longest first
        # Milliseconds, by tenant, while there are costly requests.
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._credit_ms = 0.0
        self._pace = 1.0  # how much of its share the thread gets done

    def observe(
        self,
        owners: Sequence[Request],
        mask_ms: Mapping[int, float],
        step_ms: float,
        late: Collection[int] = (),
    ) -> None:
        """A step's result: the requests of its rows that sample, the costs of some of them by index, and which are
        late."""
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
        """Whether a key has rows beside the costly ones, and none of those."""
        tenants = {request.tenant for request in self._costly}
        return any(request.tenant not in tenants for request in owners)

    def select(self, decoding: Sequence[Request]) -> Sequence[Request]:
        """Which of these get a row in the next step; at least one of them."""
        if not self._costly:
            return decoding
        chosen = [request for request in decoding if request not in self._costly]
        among = set(decoding)
        waiting = [request for request in self._costly if request in among]
        while waiting and (self._credit_ms > 0.0 or not chosen):
            request = min(waiting, key=lambda request: self._spent[request.tenant])
            waiting.remove(request)
            cost = self._costly.pop(request)
            self._costly[request] = cost  # the last in the line
            self._credit_ms = max(self._credit_ms - cost, -MOST_DEBT_MS)
            self._spent[request.tenant] += cost
            chosen.append(request)
        return chosen
