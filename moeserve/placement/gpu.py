"""A GPU as the placement sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU's memory, and the features of the GPU engine; a feature that it lacks causes an error at the start."""

    free_bytes: int
    reserved_bytes: int  # what the engine needs besides weights and KV
    can_stream: bool = True  # can stream RAM experts' weights to the GPU for long prompts
