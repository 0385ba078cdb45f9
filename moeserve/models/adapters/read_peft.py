"""Reads adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

The files' headers are checked against the model's shape before anything is allocated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeserve.models.adapters.adapter import KEY_BYTES, Adapter, Floats, LowRank, ProductKey
from moeserve.models.adapters.errors import OTHER, AdapterError
from moeserve.models.adapters.floats import TYPES, to_floats
from moeserve.models.adapters.fused_experts import FusedForm, fused_form, size_of_fused, split_fused
from moeserve.models.adapters.peft_config import CONFIG_FILE, read_peft_config
from moeserve.models.adapters.peft_names import BASE_LAYER, FUSED_EXPERTS, Place, parse_name, place_of
from moeserve.models.adapters.products import ProductShape, most_tensors, products_of
from moeserve.models.adapters.scope import AdapterScope, scope_of
from moeserve.models.adapters.sizes import PairSize, read_bytes
from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelShape
from moeserve.models.registry import FAMILIES
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.safetensors_file import StoredTensor, read_tensors, stored_numbers

WEIGHTS_FILE = "adapter_model.safetensors"
# Limit of a header's size: steps wait while it is read. PEFT uses 180 bytes per tensor.
METADATA_BYTES = 1 << 20
TENSOR_BYTES = 512


@dataclass(slots=True)
class _Module:
    """The checked matrices A and B of one module."""

    name: str
    key: str  # name that the config's patterns match; includes the parameter's name for an adapted parameter
    place: Place
    a: StoredTensor
    b: StoredTensor
    form: FusedForm | None  # the form of a parameter of all experts; None: the module is a single matrix


class PeftAdapter:
    """An adapter whose headers were read and fit the model."""

    def __init__(self, name: str, folder: Path, shape: ModelShape) -> None:
        """Reads the headers. Raises AdapterError, which names the tensor or setting."""
        self._name = name
        self.path = folder
        self._shape = shape
        self._config = read_peft_config(folder)
        self._modules = [self._checked(*found) for found in self._pairs()]
        if not self._modules:
            raise AdapterError(folder / WEIGHTS_FILE, f"has no tensors; {OTHER}")

    @property
    def nbytes(self) -> int:
        """Bytes in memory after reading."""
        return read_bytes(self.sizes)

    @property
    def sizes(self) -> list[PairSize]:
        return [self._size(module) for module in self._modules]

    @property
    def scope(self) -> AdapterScope:
        fused = n.FFN_GATE_EXPS  # here this name stands for gate and up, or for down
        parts = [module.place.part for module in self._modules]
        return scope_of(fused if part == FUSED_EXPERTS else part for part in parts)

    def read(self) -> Adapter:
        """Reads the weights. Raises AdapterError for values that are not finite, and MemoryError."""
        products: dict[ProductKey, LowRank] = {}
        for module in self._modules:
            products |= self._products(module)
        return Adapter(self._name, self._key(), products)

    def _products(self, module: _Module) -> dict[ProductKey, LowRank]:
        a, b = self._floats(module.a), self._floats(module.b) * np.float32(self._config.scale_of(module.key))
        place = module.place
        if module.form is None:
            return {ProductKey(place.layer, place.part, place.expert or 0): LowRank(a, b)}
        experts = self._product(place.layer, n.FFN_GATE_EXPS, module.name).experts
        return dict(split_fused(place.layer, module.form, a, b, experts))

    def _size(self, module: _Module) -> PairSize:
        (rank, cols), rows = module.a.shape, module.b.shape[0]
        if module.form is None:
            return PairSize(rank, cols, rows)
        experts = self._product(module.place.layer, n.FFN_GATE_EXPS, module.name).experts
        return size_of_fused(module.form, rank, cols, rows, experts)

    def _pairs(self) -> Iterator[tuple[str, StoredTensor, StoredTensor]]:
        """Yields each module's name, A and B."""
        path = self.path / WEIGHTS_FILE
        try:
            _, tensors = read_tensors(path, METADATA_BYTES + TENSOR_BYTES * most_tensors(self._shape))
        except ModelError as error:
            raise AdapterError(path, str(error).removeprefix(f"{path}: ")) from error
        modules: dict[str, dict[str, StoredTensor]] = {}
        for tensor_name, tensor in tensors.items():
            parsed = parse_name(tensor_name)
            if parsed is None:
                raise AdapterError(
                    path,
                    f"tensor {tensor_name!r} is not a lora_A or lora_B of a module: not supported; {OTHER}",
                )
            modules.setdefault(parsed.module, {})[parsed.matrix] = tensor
        for module, pair in modules.items():
            if len(pair) < 2:
                (only,) = pair.values()
                raise AdapterError(
                    path,
                    f"tensor {only.name!r} has no counterpart: lora_A and lora_B must both exist; {OTHER}",
                )
            yield module, pair["A"], pair["B"]

    def _checked(self, module: str, a: StoredTensor, b: StoredTensor) -> _Module:
        place = place_of(module)
        if place is None:
            raise self._bad(a, "is of a module for which adapters are not supported")
        for tensor in (a, b):
            if len(tensor.shape) != 2:
                raise self._bad(tensor, f"has {len(tensor.shape)} dimensions; two are expected")
            if tensor.dtype not in TYPES:
                raise self._bad(tensor, f"is of type {tensor.dtype}; supported are {', '.join(TYPES)}")
        if place.part == FUSED_EXPERTS:
            return self._fused(module, place, a, b)
        product = self._product(place.layer, place.part, a.name)
        if (place.expert is not None) != product.is_routed or (place.expert or 0) >= product.experts:
            raise self._bad(a, f"is of an expert that the model lacks: it has {product.experts}")
        key = self._config.key_of(module)
        self._check(key, a, b, product.cols, product.rows, 1)
        return _Module(module, key, place, a, b, None)

    def _fused(self, module: str, place: Place, a: StoredTensor, b: StoredTensor) -> _Module:
        gate = self._product(place.layer, n.FFN_GATE_EXPS, a.name)
        form = fused_form(a.shape[1], b.shape[0], gate, is_interleaved=_has_interleaved_experts(self._shape))
        if form is None:
            raise self._bad(
                a, f"{_by(a)} with B {_by(b)} fits no parameter of experts of {gate.rows} x {gate.cols}"
            )
        key = f"{module.replace(BASE_LAYER, '')}.{form.parameter}"
        self._check(key, a, b, a.shape[1], b.shape[0], gate.experts)
        return _Module(module, key, place, a, b, form)

    def _check(self, key: str, a: StoredTensor, b: StoredTensor, cols: int, rows: int, experts: int) -> None:
        rank = self._config.rank_of(key) * experts
        for tensor, expected in ((a, (rank, cols)), (b, (rows, rank))):
            if tensor.shape != expected:
                wanted = f"{expected[0]} x {expected[1]}"
                raise self._bad(tensor, f"is {_by(tensor)}; the model and {CONFIG_FILE} ask for {wanted}")

    def _product(self, layer: int, part: str, tensor: str) -> ProductShape:
        path = self.path / WEIGHTS_FILE
        if layer >= self._shape.num_layers:
            raise AdapterError(
                path,
                f"tensor {tensor!r} is of layer {layer}; the model has {self._shape.num_layers}; {OTHER}",
            )
        product = products_of(self._shape, layer).get(part)
        if product is None:
            raise AdapterError(
                path,
                f"tensor {tensor!r} is for {part} of layer {layer}, which adapters cannot change; {OTHER}",
            )
        return product

    def _floats(self, tensor: StoredTensor) -> Floats:
        found = to_floats(stored_numbers(tensor), tensor.dtype)
        if not np.isfinite(found).all():
            raise self._bad(tensor, "has numbers that are not finite")
        return found

    def _key(self) -> str:
        digest = hashlib.blake2b(digest_size=KEY_BYTES)
        digest.update((self.path / CONFIG_FILE).read_bytes())
        digest.update(self._modules[0].a.buffer)
        return digest.hexdigest()

    def _bad(self, tensor: StoredTensor, problem: str) -> AdapterError:
        return AdapterError(self.path / WEIGHTS_FILE, f"tensor {tensor.name!r} {problem}; {OTHER}")


def _has_interleaved_experts(shape: ModelShape) -> bool:
    family = FAMILIES.get(shape.architecture)
    mapping = None if family is None else family.hugging_face
    return mapping is not None and mapping.interleaved_experts is not None


def _by(tensor: StoredTensor) -> str:
    return " x ".join(map(str, tensor.shape))
