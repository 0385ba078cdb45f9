"""A GPU engine's description of itself: its device, and where the model's parts are."""

from __future__ import annotations

import torch

from moeserve.placement import Placement
from moeserve.worker.loading.gpu.load_weights import InRam


def describe_device(placement: Placement, device: torch.device, in_ram: InRam | None, num_gpus: int) -> str:
    """Returns the GPU's name, and which parts of the model are on the GPU, in RAM and on disk."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    if num_gpus > 1:
        name = f"{num_gpus} x {name}"
    layers = len(placement.layers)
    if placement.unpacked_layers:
        name = f"{name}, experts of {len(placement.unpacked_layers)} of {layers} layers unpacked, too"
    if in_ram is None:
        return f"{device.type} ({name})"
    here = f"{placement.num_gpu_experts} of {sum(of.num_experts for of in placement.layers)} experts"
    if placement.layers_in_ram:
        here = f"the last {len(placement.gpu_layers)} of {layers} layers and {here}"
    elif placement.begins_in_ram:
        here = f"all but the embedding and {here}"
    stream, has_disk = in_ram.stream, in_ram.experts is not None and in_ram.experts.disk is not None
    there = "RAM and on disk" if has_disk else "RAM"
    return (
        f"{device.type} ({name} with {here}, the others in {there}: {stream.isa}, {stream.threads} threads)"
    )
