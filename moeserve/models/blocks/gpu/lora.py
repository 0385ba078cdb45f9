"""The adapters of a decoder on a GPU: their matrices in slots, which steps find by a table on the device.

A CUDA graph has the launches of the adapters' products whether a row of it asks for one or not, and each costs a
microsecond or two. So graphs are captured for scopes: without any adapter, and for the kinds of products that the
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

_ENTRY = 4  # int64s of a product: kernels/lora/triton.py


class _Products(NamedTuple):
    """The adapters' products of one matrix of a layer, or of its experts'."""

    first: int  # among all products
    experts: int
    cols: int


@dataclass(frozen=True, slots=True)
class GpuAdapterMatrices:
    """An adapter as the GPU's kernels read it."""

    entries: Tensor  # int64 [products, 4], on the host
    matrices: Tensor  # flat, on the device: what the entries point into
    scope: AdapterScope

    @property
    def num_bytes(self) -> int:
        return self.matrices.nbytes


class GpuAdapterRows(NamedTuple):
    """Which adapters the rows of a step ask for."""

    slots: Tensor  # int32 [rows] on the device, -1: none
    scope: AdapterScope  # of what is launched


class GpuAdapters:
    """The adapters of a model by slot. Owns their matrices and the table. One writer: the thread that executes plans,
    but for `prepare`."""

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
        """capacity: slots. rank: the largest that an adapter may have. dtype: of the matrices. scopes: those that
        CUDA graphs are captured for, the last of them with all that any adapter may change. experts_in_ram: some routed
        experts are not on the GPU, which no adapter may then change."""
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
        # Of what is loaded beside the steps: a stream of its own, so that no step waits for a copy.
        self._uploads = torch.cuda.Stream(device) if device.type == "cuda" else None

    def check(self, checked: PeftAdapter | GgufAdapter) -> None:
        """Raises AdapterError for one that cannot be here."""
        if self._experts_in_ram and checked.scope & AdapterScope.ROUTED_EXPERTS:
            raise AdapterError(
                checked.path,
                "changes routed experts, some of which are in RAM: that is not supported; have all of them on the GPU, "
                "or say --device cpu",
            )
        rank = max(size.rank for size in checked.sizes)
        if rank > self.rank:
            raise AdapterError(
                checked.path,
                f"has a rank of {rank}, and this server has room for ranks up to {self.rank}: name an adapter of that "
                "rank in --lora-modules",
            )

    def needed_bytes(self, checked: PeftAdapter | GgufAdapter) -> int:
        """GPU memory for its matrices."""
        return gpu_matrix_bytes(checked.sizes, self._dtype.itemsize)

    def held_bytes(self, matrices: GpuAdapterMatrices) -> int:
        return matrices.num_bytes

    def prepare(self, adapter: Adapter) -> GpuAdapterMatrices:
        """Brings it to the GPU; beside the steps, in another thread. Raises MemoryError."""
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
        """Only between two steps."""
        self._held[slot] = matrices
        self._table[slot].copy_(matrices.entries)

    def remove(self, slot: int) -> None:
        """Only between two steps, and when no row asks for it any more."""
        self._table[slot].zero_()
        del self._held[slot]

    def scope_for(self, slots: Iterable[int]) -> AdapterScope:
        """The smallest captured scope that covers what the adapters in these slots (-1: none) change."""
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
        """The table of parts that lie one behind the other; None where the layer has none of them."""
        places = [self._places[layer, part] for part in parts if (layer, part) in self._places]
        if not places:
            return None
        first, experts, cols = places[0]
        entries = self._table[:, first : first + len(places) * experts]
        return AdapterTable(entries, len(places), experts, cols, self.rank, self._dtype)

    def _upload(self, flat: Tensor, adapter: Adapter) -> Tensor:
        """flat gets the matrices one after another: A [rank, cols], then B [rows, rank], the rank rounded up."""
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
