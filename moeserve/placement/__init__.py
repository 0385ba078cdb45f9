"""Decides which part of a model is stored and computed on which device. Pure functions: no torch, no CUDA.

options.placement_options(config, ...)  reads the flags and the files that they name
place.place(sizes, options, gpu)        computes the placement
placement.Placement                     the result; the engine follows it, `moeserve plan` prints it
"""

from moeserve.placement.gpu import Gpu
from moeserve.placement.place import PlacementOptions, place
from moeserve.placement.placement import Device, LayerPlacement, Placement, Prefill
from moeserve.placement.sizes import ModelSizes

__all__ = [
    "Device",
    "Gpu",
    "LayerPlacement",
    "ModelSizes",
    "Placement",
    "PlacementOptions",
    "Prefill",
    "place",
]
