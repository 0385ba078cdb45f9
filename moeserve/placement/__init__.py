"""Which part of a model lies on which device. Pure: neither torch nor CUDA.

options.placement_options(config, ...)  reads the flags and the files they name
place.place(sizes, options, gpu)        decides
placement.Placement                     what was decided: the engine obeys, `moeserve plan` prints
"""

from moeserve.placement.place import Gpu, PlacementOptions, place
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
