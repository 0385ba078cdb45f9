"""Messages between the processes of several GPUs: the leader has a connection to each follower."""

from __future__ import annotations

import msgspec

from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.steps import StepPlan


class RankStart(msgspec.Struct, frozen=True, tag=True):
    """The leader's first message: it tells the follower its rank."""

    config: bytes  # ServerConfig as JSON
    rank: int
    devices: list[int]  # the GPUs' numbers, by rank; none: Triton's interpreter
    num_ranks: int
    leader: int  # its process id
    rendezvous: str  # a file by which the ranks' processes find one another


class RankValue(msgspec.Struct, frozen=True, tag=True):
    """A follower's value of something that all ranks must agree on."""

    value: int


class RankValues(msgspec.Struct, frozen=True, tag=True):
    """The leader's answer: all values, by rank."""

    values: list[int]


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A follower cannot load its share; it ends."""

    message: str


class RankStep(msgspec.Struct, frozen=True, tag=True):
    """A step for all ranks, with the tokens sampled in earlier steps."""

    plan: StepPlan
    # int32: the sampled tokens of the plans, in order, whose tokens are known and were not sent yet; each plan has one
    # for each row with `sample`. If the leader runs ahead, the last plan's tokens come with a later step; the GPUs
    # already have them from the leader's GPU.
    sampled: list[bytes]


class RankForget(msgspec.Struct, frozen=True, tag=True):
    """Undoes the last step completely."""


class RankExpertsWanted(msgspec.Struct, frozen=True, tag=True):
    """Asks the follower for its `RankExperts`, between two steps."""


class RankExperts(msgspec.Struct, frozen=True, tag=True):
    """The use and place of all experts of a rank's layers."""

    first_layer: int
    layers: int
    experts: int
    tokens: bytes  # int64 [layers, experts]: routed to each since the start
    on_gpu: bytes  # uint8 [layers, experts]: 1 for one in this GPU's memory
    cache: ExpertCacheCounts | None  # of the rank's expert cache, since the start


ToFollower = RankStart | RankValues | RankStep | RankForget | RankExpertsWanted
ToLeader = RankValue | RankFailed | RankExperts
