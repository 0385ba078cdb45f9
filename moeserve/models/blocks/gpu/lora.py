"""LoRA adapters of a decoder on a GPU: their matrices, in slots that steps find through a table on the device.

A CUDA graph launches the adapters' products even if no row uses an adapter, and each launch takes one or two
microseconds. So graphs are captured for several scopes: without adapters, and for each set of products that the
adapters in use change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.lora.op import AdapterTable
from moeserve.models.adapters.adapter import Adapter
from moeserve.models.adapters.errors import AdapterError
from moeserve.models.adapters.products import products_of
from moeserve.models.adapters.read_gguf import GgufAdapter
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.adapters.scope import AdapterScope, scope_of
from moeserve.models.adapters.sizes import gpu_matrix_bytes, gpu_rank
from moeserve.models.interface import ModelShape

_ENTRY = 4  # int64s per product: kernels/lora/triton.py


class _Products(NamedTuple):
    """Where the adapter table has one matrix of a layer, or the same matrix of all its experts."""

    first: int  # index of the first in the table
    experts: int
    cols: int


@dataclass(frozen=True, slots=True)
class GpuAdapterMatrices:
    """A LoRA adapter's matrices on the GPU, in the layout that the kernels read."""

    entries: Tensor  # int64 [products, 4], on the host
    matrices: Tensor  # flat, on the device; the entries hold addresses in it
    scope: AdapterScope

    @property
    def num_bytes(self) -> int:
        return self.matrices.nbytes


class GpuAdapterRows(NamedTuple):
    """The LoRA adapter that each row of a step uses, and the products that any of them changes."""

    slots: Tensor  # int32 [rows] on the device; -1: none
    scope: AdapterScope  # the products that are launched


class GpuAdapters:
    """A model's adapters by slot. Owns their matrices and the table. Only the thread that executes plans writes,
    except in `prepare`."""

    def __init__(
        self,
        shape: ModelShape,
        capacity: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        scopes: Sequence[AdapterScope],
        *,
        experts_in_ram: bool = False,
    ) -> None:
        """capacity: number of slots. rank: largest rank of an adapter. dtype: the dtype of the matrices. scopes: the
        scopes that CUDA graphs are captured for; the last one includes all products that any adapter may change.
        experts_in_ram: whether some routed experts are in RAM; adapters then may not change routed experts."""
        self.shape = shape
        self.capacity = capacity
        self.rank = gpu_rank(rank)
        self.scopes = tuple(scopes)  # without NONE, which graphs are always captured for
        self._dtype = dtype
        self._device = device
        self._experts_in_ram = experts_in_ram
        self._places: dict[tuple[int, str], _Products] = {}
        total = 0
        for layer in range(shape.num_layers):
            for part, product in products_of(shape, layer).items():
                self._places[layer, part] = _Products(total, product.experts, product.cols)
                total += product.experts
        self._num_products = total
        self._table = torch.zeros(capacity, total, _ENTRY, dtype=torch.int64, device=device)
        self._held: dict[int, GpuAdapterMatrices] = {}
        # Uploads have their own stream, so that no step waits for a copy.
        self._uploads = torch.cuda.Stream(device) if device.type == "cuda" else None

    def check(self, checked: PeftAdapter | GgufAdapter) -> None:
        """Raises AdapterError for an adapter that this engine cannot hold."""
        if self._experts_in_ram and checked.scope & AdapterScope.ROUTED_EXPERTS:
            raise AdapterError(
                checked.path,
                "changes routed experts, some of which are in RAM, which is not supported: place all experts on the "
                "GPU, or say --device cpu",
            )
        rank = max(size.rank for size in checked.sizes)
        if rank > self.rank:
            raise AdapterError(
                checked.path,
                f"has rank {rank}, but this server was started for ranks up to {self.rank}: restart it with an adapter "
                "of that rank in --lora-modules",
            )

    def needed_bytes(self, checked: PeftAdapter | GgufAdapter) -> int:
        """Returns the bytes of GPU memory that the adapter's matrices need."""
        return gpu_matrix_bytes(checked.sizes, self._dtype.itemsize)

    def held_bytes(self, matrices: GpuAdapterMatrices) -> int:
        return matrices.num_bytes

    def prepare(self, adapter: Adapter) -> GpuAdapterMatrices:
        """Copies an adapter to the GPU, in another thread, beside the steps. Raises MemoryError."""
        entries = np.zeros((self._num_products, _ENTRY), np.int64)
        sizes = [
            gpu_rank(len(pair.a)) * (pair.a.shape[1] + len(pair.b)) for pair in adapter.products.values()
        ]
        flat = torch.zeros(sum(sizes), dtype=self._dtype)
        on_device = self._upload(flat, adapter)
        address, at = on_device.data_ptr(), 0
        for (key, pair), size in zip(adapter.products.items(), sizes, strict=True):
            rank, cols = gpu_rank(len(pair.a)), pair.a.shape[1]
            where = self._places[key.layer, key.part].first + key.expert
            first = address + at * flat.itemsize
            entries[where] = first, first + rank * cols * flat.itemsize, rank, 0
            at += size
        scope = scope_of({key.part for key in adapter.products})
        return GpuAdapterMatrices(torch.from_numpy(entries), on_device, scope)

    def put(self, slot: int, matrices: GpuAdapterMatrices) -> None:
        """Installs an adapter. May be called only between two steps."""
        self._held[slot] = matrices
        self._table[slot].copy_(matrices.entries)

    def remove(self, slot: int) -> None:
        """Removes an adapter. May be called only between two steps, when no row uses the adapter any more."""
        self._table[slot].zero_()
        del self._held[slot]

    def scope_for(self, slots: Iterable[int]) -> AdapterScope:
        """Returns the smallest captured scope that covers the products that the adapters in these slots (-1: none)
        change."""
        wanted = AdapterScope.NONE
        for slot in set(slots):
            if slot >= 0:
                wanted |= self._held[slot].scope
        return self.captured_scope(wanted)

    def captured_scope(self, wanted: AdapterScope) -> AdapterScope:
        if wanted == AdapterScope.NONE:
            return wanted
        return next(scope for scope in self.scopes if wanted & scope == wanted)

    def table(self, layer: int, parts: Sequence[str]) -> AdapterTable | None:
        """Returns the part of the table for `parts`, which are consecutive in it; None if the layer has none of
        them."""
        places = [self._places[layer, part] for part in parts if (layer, part) in self._places]
        if not places:
            return None
        first, experts, cols = places[0]
        entries = self._table[:, first : first + len(places) * experts]
        return AdapterTable(entries, len(places), experts, cols, self.rank, self._dtype)

    def _upload(self, flat: Tensor, adapter: Adapter) -> Tensor:
        """Fills `flat` with the matrices one after another, A [rank, cols] then B [rows, rank], rank rounded up,
        and copies it to the device."""
        at = 0
        for pair in adapter.products.values():
            (rank, cols), rows = pair.a.shape, len(pair.b)
            padded = gpu_rank(rank)
            flat[at : at + rank * cols] = torch.from_numpy(pair.a).reshape(-1)
            at += padded * cols
            flat[at : at + rows * padded].view(rows, padded)[:, :rank] = torch.from_numpy(pair.b)
            at += padded * rows
        if self._uploads is None:
            return flat
        try:
            with torch.cuda.stream(self._uploads):
                on_device = flat.to(self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError from error
        self._uploads.synchronize()
        return on_device
