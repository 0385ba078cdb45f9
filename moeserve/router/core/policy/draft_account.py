"""Bounds the time that drafts may lose, even if the chooser of drafts (`DraftLength`) errs.

Every step pays a small share of its time without drafts into an account. Drafts are paid from it: the time that they
add, minus the time that the tokens that they bring would have taken. Without a positive balance no drafts are made, so
in the long run drafts lose at most that share, plus the step that overdraws the account.

A drafting model must read a request's text before it can draft, which may take as long as many steps and pays only
afterwards. A second account pays for this reading; its income is another share of each step's time and the time that
drafts save. Without a positive balance the model begins to read no further text.

A next-token block must keep up with the texts, prompts too, so that it can draft. In a large model that is a thousandth
of a step, in a small one it may be several hundredths. A third account, with the same income, pays for this: when it is
empty, the block leaves the texts until enough is saved for several requests.
"""

from __future__ import annotations

SHARE = 0.01  # of steps' time, which drafts may lose
FIRST_TOKENS = 1.0  # the balance at first, in tokens' time, so that something can be learnt
MOST_STEPS = 8.0  # the greatest balance, in steps' time: gains of long ago must not pay for what is lost now
MOST_STEPS_READING = 64.0  # the same, of what pays for the reading of texts
MOST_STEPS_KEEPING = 16.0  # the same, of what pays for keeping up, which a CPU does for 64 rows at once
# In steps' time, the balance at which a block leaves the texts, as it keeps up with several steps at once, and that at
# which it follows them again.
LEAVES_AT, RETURNS_AT = -1.0, 1.0


class DraftAccount:
    def __init__(self, most_steps: float = MOST_STEPS, least_steps: float = -MOST_STEPS) -> None:
        """most_steps, least_steps: the greatest and the smallest balance, as multiples of a step's time. A larger loss
        of a single step comes from a pause of the machine that happened during drafting, and must not end drafts for
        hours."""
        self._most_steps = most_steps
        self._least_steps = least_steps
        self._balance_ms: float | None = None  # None: no step yet

    @property
    def allows(self) -> bool:
        """True if the next step may have drafts."""
        return self._balance_ms is not None and self._balance_ms > 0.0

    def passed(self, rows: int, without_ms: float, lost_ms: float) -> None:
        """Records a finished step with `rows` requests' rows, which takes `without_ms` milliseconds without drafts.
        lost_ms: time that its drafts added minus time that they saved."""
        before = FIRST_TOKENS * without_ms / rows if self._balance_ms is None else self._balance_ms
        balance = min(before + SHARE * without_ms - lost_ms, self._most_steps * without_ms)
        self._balance_ms = max(balance, self._least_steps * without_ms)


class KeepAccount:
    def __init__(self) -> None:
        self._balance_ms: float | None = None  # None: no step yet
        self._gained_ms = 0.0  # by drafts, in the step that is recorded next
        self.allows = True  # the block keeps up with the texts

    def gained(self, ms: float) -> None:
        """Adds the time that a step's drafts saved, before `passed` records the step."""
        self._gained_ms = ms

    def passed(self, ms: float, keep_ms: float) -> None:
        """Records a finished step, which takes `ms` milliseconds without drafts; 0: not known. keep_ms: additional time
        for the next-token block."""
        gained, self._gained_ms = self._gained_ms, 0.0
        if ms <= 0.0:
            return
        before = FIRST_TOKENS * ms if self._balance_ms is None else self._balance_ms
        balance = before + SHARE * ms + gained - keep_ms
        self._balance_ms = max(min(balance, MOST_STEPS_KEEPING * ms), -MOST_STEPS * ms)
        if balance <= LEAVES_AT * ms:
            self.allows = False
        elif balance >= RETURNS_AT * ms:
            self.allows = True
