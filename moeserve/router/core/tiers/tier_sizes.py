"""What there is to know of the tiers behind the KV pool before they are used."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.messages.pages import Tier


@dataclass(frozen=True, slots=True)
class TierSizes:
    page_tokens: int
    page_bytes: int
    state_bytes: int  # of a recurrent state
    max_running: int  # requests, each of which has a state
    write_bytes: int  # copied out before a step whose decode rows would wait for more
    tiers: tuple[Tier, ...]  # the fastest first
