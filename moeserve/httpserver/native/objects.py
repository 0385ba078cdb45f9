"""What our own endpoints answer, as typed dicts. (/health answers `engine_client.Health`.)"""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Experts(TypedDict):
    object: Literal["experts"]
    model: str
    layers: int
    experts: int  # of a layer
    experts_per_token: int
    counts: list[list[int]]  # [layers][experts]: tokens routed to each since the start
    gpu_experts: list[list[int]]  # of each layer: the ids of those in GPU memory, ascending


class ExpertsHeat(TypedDict):
    """The file that --expert-heat reads, described in docs/reference/placement-files.md."""

    format: Literal["moeserve-expert-heat"]
    version: Literal[1]
    model: str
    layers: int
    experts: int
    experts_per_token: int
    counts: list[list[int]]
