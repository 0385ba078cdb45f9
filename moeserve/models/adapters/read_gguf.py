"""Reads adapters written by llama.cpp's convert_lora_to_gguf.py: one GGUF file.

Tensors have the model's names with the suffixes .lora_a and .lora_b: [rank, in] and [out, rank], for routed experts
[experts, rank, in] and [experts, out, rank]. The scale is adapter.lora.alpha / rank. The header is checked completely
before anything is allocated.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

import numpy as np

from moeserve.models.adapters.adapter import KEY_BYTES, Adapter, Floats, LowRank, ProductKey
from moeserve.models.adapters.errors import OTHER, AdapterError
from moeserve.models.adapters.floats import TYPES, to_floats
from moeserve.models.adapters.peft_config import MAX_RANK
from moeserve.models.adapters.products import ProductShape, products_of
from moeserve.models.adapters.scope import AdapterScope, scope_of
from moeserve.models.adapters.sizes import PairSize, read_bytes
from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelShape
from moeserve.models.sources.gguf import TensorInfo, open_gguf

_NAME = re.compile(r"blk\.(?P<layer>\d{1,5})\.(?P<part>\w+)\.weight\.lora_(?P<matrix>[ab])")


class GgufAdapter:
    """An adapter whose header was read and fits the model."""

    def __init__(self, name: str, path: Path, shape: ModelShape) -> None:
        """Reads the header. Raises AdapterError, which names the tensor or key."""
        self._name = name
        self.path = path
        self._shape = shape
        try:
            self._file = open_gguf(path)
            self._alpha = self._checked_alpha()
        except ModelError as error:
            raise AdapterError(path, str(error).removeprefix(f"{path}: ")) from error
        found: dict[tuple[int, str], dict[str, TensorInfo]] = {}
        for tensor in self._file.tensors.values():
            match = _NAME.fullmatch(tensor.name)
            if match is None:
                raise self._bad(tensor, "is not a lora_a or lora_b of a layer's matrix: not supported")
            found.setdefault((int(match["layer"]), match["part"]), {})[match["matrix"]] = tensor
        if not found:
            raise AdapterError(path, f"has no tensors; {OTHER}")
        self._pairs = {place: self._checked(*place, pair) for place, pair in found.items()}

    @property
    def nbytes(self) -> int:
        """Bytes in memory after reading."""
        return read_bytes(self.sizes)

    @property
    def sizes(self) -> list[PairSize]:
        return [
            PairSize(a.shape[-2], a.shape[-1], b.shape[-2], math.prod(a.shape[:-2]))
            for a, b in self._pairs.values()
        ]

    @property
    def scope(self) -> AdapterScope:
        return scope_of(part for _, part in self._pairs)

    def read(self) -> Adapter:
        """Reads the weights. Raises AdapterError for values that are not finite, and MemoryError."""
        products: dict[ProductKey, LowRank] = {}
        for (layer, part), (tensor_a, tensor_b) in self._pairs.items():
            a, b = self._floats(tensor_a), self._floats(tensor_b)
            b = b * np.float32(self._alpha / a.shape[1] if self._alpha else 1.0)
            for expert, pair in enumerate(zip(a, b, strict=True)):
                products[ProductKey(layer, part, expert)] = LowRank(*pair)
        return Adapter(self._name, self._key(), products)

    def _checked_alpha(self) -> float:
        metadata = self._file.metadata
        for key, expected in (
            ("general.type", "adapter"),
            ("general.architecture", self._shape.architecture),
            ("adapter.type", "lora"),
        ):
            value = metadata.require_str(key)
            if value != expected:
                raise AdapterError(self.path, f"{key} is {value!r}; {expected!r} is expected")
        if "adapter.alora.invocation_tokens" in metadata:
            raise AdapterError(
                self.path,
                "adapter.alora.invocation_tokens: activated LoRA is not supported; choose a plain adapter",
            )
        return metadata.require_float("adapter.lora.alpha", 0.0, 1e6)

    def _checked(self, layer: int, part: str, pair: dict[str, TensorInfo]) -> tuple[TensorInfo, TensorInfo]:
        if len(pair) < 2:
            (only,) = pair.values()
            raise self._bad(only, "has no counterpart: lora_a and lora_b must both exist")
        a, b = pair["a"], pair["b"]
        if layer >= self._shape.num_layers:
            raise self._bad(a, f"is of layer {layer}; the model has {self._shape.num_layers}")
        product = products_of(self._shape, layer).get(part)
        if product is None:
            raise self._bad(a, f"is for {part} of layer {layer}, which adapters cannot change")
        self._check_shapes(a, b, product)
        for tensor in (a, b):
            if tensor.type.name not in TYPES:
                raise self._bad(tensor, f"is of type {tensor.type.name}; supported are {', '.join(TYPES)}")
        return a, b

    def _check_shapes(self, a: TensorInfo, b: TensorInfo, product: ProductShape) -> None:
        experts = (product.experts,) if product.is_routed else ()
        rank = a.shape[-2] if len(a.shape) == len(experts) + 2 else 0
        if not 1 <= rank <= MAX_RANK or a.shape != (*experts, rank, product.cols):
            raise self._bad(a, f"has the shape {a.shape}; {(*experts, 'rank', product.cols)} is expected")
        if b.shape != (*experts, product.rows, rank):
            raise self._bad(b, f"has the shape {b.shape}; {(*experts, product.rows, rank)} is expected")

    def _floats(self, tensor: TensorInfo) -> Floats:
        """Returns the tensor as float32 [experts, rows, cols]."""
        rows, cols = tensor.shape[-2:]
        numbers = self._file.data(tensor.name).view(f"<u{tensor.nbytes // math.prod(tensor.shape)}")
        found = to_floats(numbers, tensor.type.name).reshape(-1, rows, cols)
        if not np.isfinite(found).all():
            raise self._bad(tensor, "has numbers that are not finite")
        return found

    def _key(self) -> str:
        digest = hashlib.blake2b(digest_size=KEY_BYTES)
        for tensor in self._file.tensors.values():
            digest.update(f"{tensor.name} {tensor.type.name} {tensor.shape} ".encode())
            digest.update(self._file.data(tensor.name).data)
        digest.update(str(self._alpha).encode())
        return digest.hexdigest()

    def _bad(self, tensor: TensorInfo, problem: str) -> AdapterError:
        return AdapterError(self.path, f"tensor {tensor.name!r} {problem}; {OTHER}")
