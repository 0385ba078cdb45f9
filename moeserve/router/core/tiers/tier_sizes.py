"""The fixed sizes of the tiers behind the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.messages.pages import Tier


@dataclass(frozen=True, slots=True)
class TierSizes:
    page_tokens: int
    page_bytes: int
    state_bytes: int  # of one recurrent state
    max_running: int  # requests that may run at once, each with a state
    write_bytes: int  # bytes that may be copied out before a step with decode rows, which wait for it
    tiers: tuple[Tier, ...]  # fastest first
