"""The messages between the processes of several GPUs, over a line between the leader and each follower."""

from __future__ import annotations

import msgspec

from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.steps import StepPlan


class RankStart(msgspec.Struct, frozen=True, tag=True):
    """The leader's first message: who the follower is."""

    config: bytes  # ServerConfig as JSON
    rank: int
    devices: list[int]  # the GPUs' numbers, by rank; none: Triton's interpreter
    num_ranks: int
    leader: int  # its process id
    rendezvous: str  # a file by which the ranks' processes find one another


class RankValue(msgspec.Struct, frozen=True, tag=True):
    """A follower's value, of something that all ranks must agree on."""

    value: int


class RankValues(msgspec.Struct, frozen=True, tag=True):
    """The leader's answer: all values, by rank."""

    values: list[int]


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A follower cannot load its share; it ends."""

    message: str


class RankStep(msgspec.Struct, frozen=True, tag=True):
    """A step for all ranks, with what those before have sampled."""

    plan: StepPlan
    # int32, of each row of a plan with `sample`, in order: of the plans whose tokens are known and not told yet, in
    # order. Where the leader runs ahead, those of the last plan come later: the GPUs have them from the leader's.
    sampled: list[bytes]


class RankForget(msgspec.Struct, frozen=True, tag=True):
    """Undoes the last step: nothing of it remains."""


class RankExpertsWanted(msgspec.Struct, frozen=True, tag=True):
    """Between two steps: the follower answers with its `RankExperts`."""


class RankExperts(msgspec.Struct, frozen=True, tag=True):
    """The experts of a rank's layers, all of each."""

    first_layer: int
    layers: int
    experts: int
    tokens: bytes  # int64 [layers, experts]: routed to each since the start
    on_gpu: bytes  # uint8 [layers, experts]: 1 for one in this GPU's memory
    cache: ExpertCacheCounts | None  # of the rank's expert cache, since the start


ToFollower = RankStart | RankValues | RankStep | RankForget | RankExpertsWanted
ToLeader = RankValue | RankFailed | RankExperts
