"""A folder in Hugging Face's layout as a ModelSource: safetensors under GGUF's keys and tensor names.

In such a folder each expert of a layer has its own tensors. `data` gathers them to [E, out, in]; it copies one tensor
at a time, when packing needs it. Only a GGUF file's weights can be used in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.gguf import Metadata, TensorInfo
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.json_files import read_json
from moeserve.models.sources.model_files import is_model_file
from moeserve.models.sources.regular_file import FileVersion
from moeserve.models.sources.row_places import RowPlaces
from moeserve.models.sources.weight_files import weight_files
from moeserve.quantization.table import ZERO_TYPES

from .column_order import stacked
from .config_json import metadata_of, spelling
from .fp4_weights import with_packed_experts
from .fp8_blocks import with_scales
from .integer_weights import with_packed
from .interleaved_experts import interleaved_experts
from .made_tensor import MadeTensor, bytes_of, floats_made, is_zero_bias, numbers_of
from .mapping import HuggingFaceMapping
from .merged_experts import merged_experts
from .next_token_names import NextTokenNames
from .quantization_config import FLOATS, quantization_of
from .ranked_qkv import cut_in_parts
from .safetensors_file import StoredTensor, read_tensors, release_pages
from .tied_head import EMBEDDING, HEAD, settle_head
from .tokenizer_json import read_tokenizer
from .wrapped_text import text_tensors, with_prefixes

CONFIG = "config.json"

_NORM = "model.norm.weight"


class HuggingFaceFolder:
    """A checked folder. The mappings last as long as this object or any array from `data`."""

    is_mapped = False

    def __init__(
        self,
        path: Path,
        architecture: str,
        mapping: HuggingFaceMapping,
        metadata: Metadata,
        stored: dict[str, StoredTensor],
        file_bytes: int,
    ) -> None:
        self.path = path
        self.architecture = architecture
        self._mapping = mapping
        self.metadata = metadata
        self.file_bytes = file_bytes
        self.tensors: dict[str, TensorInfo] = {}
        self._parts: dict[str, list[StoredTensor]] = {}
        self._made: dict[str, MadeTensor] = {}
        self.skipped: dict[str, int] = {}
        self._skip(stored, mapping.skipped)
        # transformers writes a shared expert of width 0 as empty tensors.
        for name in [name for name, tensor in stored.items() if 0 in tensor.shape]:
            del stored[name]
        if mapping.made_outside is not None:
            for name, made in mapping.made_outside(path, metadata, stored):
                self._add_made(name, made)
        self._add_made_of_layers(stored)
        if mapping.made_of_none is not None:
            for name, made in mapping.made_of_none(metadata):
                self._add_made(name, made)
        for name, theirs in self._names(stored):
            self._add(name, theirs, stored)
        if mapping.interleaved_experts is not None:
            self._add_interleaved(mapping.interleaved_experts, stored)
        self._skip(stored, self._skipped_layers())
        remaining = [name for name, tensor in stored.items() if not is_zero_bias(tensor)]
        if remaining:  # an ignored tensor, such as a bias, would silently change every answer
            raise SettingError(path, f"tensor {remaining[0]!r} has no place in a {mapping.model_type}")

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns the tensor's bytes in GGUF's form, uint8: see ModelSource.data."""
        if name in self._made:
            return self._made[name].make()
        parts = self._parts[name]
        if parts[0].packed is not None:
            return np.concatenate([bytes_of(part.packed.make()) for part in parts if part.packed is not None])
        if parts[0].scales is not None:
            return np.concatenate([bytes_of(numbers_of(part)) for part in parts])
        views = [np.frombuffer(p.buffer, np.uint8, p.end - p.start, p.start) for p in parts]
        # A header of odd length would leave 16 and 32-bit numbers at odd addresses.
        return views[0] if len(views) == 1 and parts[0].start % 4 == 0 else np.concatenate(views)

    def rows(
        self, name: str, rows: np.ndarray[Any, np.dtype[np.int64]]
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns the tensor's rows with these indices, uint8 [n, bytes of a row]: see ModelSource.rows."""
        made = self._made.get(name)
        if made is not None and made.take is not None:
            return made.take(rows)
        return np.take(self.data(name).reshape(self.tensors[name].shape[0], -1), rows, axis=0)

    def row_places(self, name: str) -> RowPlaces | None:
        """See ModelSource."""
        made = self._made.get(name)
        return None if made is None or made.places is None else made.places()

    def files_of(self, name: str) -> dict[Path, FileVersion]:
        """See ModelSource."""
        return {file.path: file.version for part in self._parts[name] for file in part.parts}

    def experts_in_file(self, name: str) -> None:
        """Returns None: a folder has each expert's matrices as tensors of their own."""

    def advise_done(self, name: str) -> None:
        """See ModelSource."""
        for part in self._parts[name]:
            release_pages(part)

    def drop_cached(self, name: str) -> None:
        """Does nothing: other tensors may be made of the same bytes."""

    def _skip(self, stored: dict[str, StoredTensor], prefixes: tuple[str, ...]) -> None:
        """Removes next-token tensors from `stored`."""
        for name in [name for name in stored if name.startswith(prefixes)]:
            tensor = stored.pop(name)
            self.skipped[name] = sum(part.end - part.start for part in tensor.parts)

    def _names(self, stored: dict[str, StoredTensor]) -> Iterator[tuple[str, list[str]]]:
        """Yields GGUF's name of each tensor, and the names of its source tensors."""
        blocks = self.metadata.require_int(f"{self.architecture}.block_count", 1, 1024)
        layers = blocks - self._count(n.NEXTN_LAYERS, blocks - 1)
        experts = self._count("expert_count", 4096)
        is_dense = self._dense_layers(layers) if experts else [True] * layers
        yield n.TOKEN_EMBD, [EMBEDDING]
        if _NORM in stored or n.OUTPUT_NORM not in self._mapping.optional:
            yield n.OUTPUT_NORM, [_NORM]
        if HEAD in stored:
            yield n.OUTPUT, [HEAD]
        for ours, theirs in self._mapping.outside.items():
            if theirs in stored or ours not in self._mapping.optional:
                yield ours, [theirs]
        for layer in range(layers):
            prefix = f"model.layers.{layer}"
            more = self._mapping.dense if is_dense[layer] else self._mapping.moe
            for ours, theirs in {**self._mapping.layer, **more}.items():
                if n.in_layer(layer, ours) in self._made:
                    continue
                if f"{prefix}.{theirs}" in stored or ours not in self._mapping.optional:
                    yield f"blk.{layer}.{ours}", [f"{prefix}.{theirs}"]
            if not is_dense[layer]:
                yield from self._expert_names(layer, experts)
        if self._mapping.next_token is not None and blocks > layers:
            yield from self._block_names(layers, experts, stored, self._mapping.next_token)

    def _expert_names(self, layer: int, experts: int) -> Iterator[tuple[str, list[str]]]:
        under = f"model.layers.{layer}.{self._mapping.experts_under}"
        for ours, theirs in self._mapping.experts.items():
            if f"blk.{layer}.{ours}" not in self._made:
                yield f"blk.{layer}.{ours}", [f"{under}.{expert}.{theirs}" for expert in range(experts)]

    def _block_names(
        self, layer: int, experts: int, stored: dict[str, StoredTensor], names: NextTokenNames
    ) -> Iterator[tuple[str, list[str]]]:
        """Yields the same for the tensors of the next-token block that are stored. The block may be incomplete, because
        only drafts need it."""
        prefix = f"model.layers.{layer}."
        all_names = {**self._mapping.layer, **self._mapping.moe, **self._mapping.dense, **names.parts}
        for ours, theirs in all_names.items():
            if prefix + theirs in stored:
                yield f"blk.{layer}.{ours}", [prefix + theirs]
        yield from (each for each in self._expert_names(layer, experts) if each[1][0] in stored)

    def _dense_layers(self, layers: int) -> list[bool]:
        key = f"{self.architecture}.{n.DENSE_LAYERS}"
        if key in self.metadata:
            return self.metadata.require_bools(key, layers)
        dense = self._count("leading_dense_block_count", layers)
        return [layer < dense for layer in range(layers)]

    def _add_interleaved(self, under: str, stored: dict[str, StoredTensor]) -> None:
        for layer in range(self.metadata.require_int(f"{self.architecture}.block_count", 1, 1024)):
            prefix = f"model.layers.{layer}.{under}."
            for ours, made in interleaved_experts(self.path, prefix, stored):
                self._add_made(n.in_layer(layer, ours), made)

    def _add_made_of_layers(self, stored: dict[str, StoredTensor]) -> None:
        for layer in range(self.metadata.require_int(f"{self.architecture}.block_count", 1, 1024)):
            prefix = f"model.layers.{layer}."
            if self._mapping.made is not None:
                for ours, made in self._mapping.made(self.path, prefix, self.metadata, stored):
                    self._add_made(n.in_layer(layer, ours), made)
            if self._mapping.experts:
                for ours, made in merged_experts(
                    self.path, f"{prefix}{self._mapping.experts_under}.", stored
                ):
                    self._add_made(n.in_layer(layer, ours), made)

    def _add_made(self, name: str, made: MadeTensor) -> None:
        nbytes = prod(made.shape[:-1]) * made.type.row_bytes(made.shape[-1])
        self.tensors[name] = TensorInfo(name, made.shape, made.type, nbytes, order=made.order)
        self._made[name] = made
        self._parts[name] = list(made.sources)

    def _skipped_layers(self) -> tuple[str, ...]:
        """Returns the prefixes of the names of tensors in layers that are not computed."""
        count = self._count(n.NEXTN_LAYERS, 1024)
        blocks = self.metadata.require_int(f"{self.architecture}.block_count", 1, 1024)
        return tuple(f"model.layers.{layer}." for layer in range(blocks - count, blocks))

    def _count(self, suffix: str, most: int) -> int:
        return self.metadata.require_int(f"{self.architecture}.{suffix}", 0, most, default=0)

    def _add(self, name: str, theirs: list[str], stored: dict[str, StoredTensor]) -> None:
        """Adds a tensor made of the tensors `theirs`, and removes those from `stored`."""
        parts = []
        for their_name in theirs:
            if their_name not in stored:
                raise ModelError(
                    self.path, f"tensor {their_name!r} is missing; download the whole repository"
                )
            parts.append(stored.pop(their_name))
        first = parts[0]
        for their_name, part in zip(theirs, parts, strict=True):
            if (part.shape, part.type) != (first.shape, first.type):
                raise SettingError(
                    self.path,
                    f"tensor {their_name!r} is {_described(part)}, {theirs[0]!r} is {_described(first)}; they are "
                    "expected to be alike",
                )
        within_layer = name.split(".", 2)[-1]
        shape = first.shape
        if self._mapping.less_one & {name, within_layer}:
            self._add_made(name, floats_made(first, shape, lambda values: values + np.float32(1)))
            return
        if within_layer in self._mapping.experts:  # one expert is a list of experts too
            shape = (len(parts), *shape)
        elif within_layer in self._mapping.flattened and len(shape) == 2 and shape[0] == 1:
            shape = shape[1:]
        kind = first.type
        nbytes = prod(shape) // kind.block_columns * kind.block_bytes
        order = stacked([None if p.packed is None else p.packed.order for p in parts], shape)
        if order is not None and name == n.TOKEN_EMBD:
            raise ModelError(
                self.path,
                f"tensor {theirs[0]!r} is an embedding with columns in another order, which "
                "is not supported; use a GGUF file of the model",
            )
        rows = stacked([None if p.packed is None else p.packed.rows for p in parts], shape)
        self.tensors[name] = TensorInfo(name, shape, kind, nbytes, order=order, row_order=rows)
        self._parts[name] = parts


def _described(tensor: StoredTensor) -> str:
    """Returns the tensor's dtype and shape for a message; of integers with scales the name of their blocks, which says
    whether they have zero points: INT4_G32 has, Q4_0 has none."""
    if tensor.packed is None:
        return f"{tensor.dtype} {list(tensor.shape)}"
    zeros = " with zero points" if tensor.type in ZERO_TYPES.values() else ""
    return f"{tensor.type.name}{zeros} {list(tensor.shape)}"


def is_hugging_face_folder(path: Path) -> bool:
    """Returns whether to open the folder as Hugging Face's. A folder that also has a model in a .gguf file is opened as
    GGUF; a vision tower or an importance matrix in a .gguf file does not count."""
    if not path.is_dir() or not (path / CONFIG).exists():
        return False
    return not any(is_model_file(file.name) for file in path.glob("*.gguf"))


def read_config(folder: Path) -> dict[str, Any]:
    """Returns config.json's settings. Raises ModelError if the file is missing, unreadable or no JSON object."""
    return read_json(folder / CONFIG)


def open_mapped_folder(
    path: Path, config: dict[str, Any], architecture: str, mapping: HuggingFaceMapping
) -> HuggingFaceFolder:
    """Opens the folder, checks everything except the tensors' shapes, which the model checks, and returns it without
    reading weights. config: content of config.json. Raises ModelError for files that are missing or damaged, and for
    settings that are not supported."""
    values = metadata_of(path / CONFIG, config, architecture, mapping)
    names = spelling(architecture, mapping)

    def complain(path: Path, key: str, problem: str) -> ModelError:
        """Makes an error that uses config.json's names."""
        if key in names:
            return SettingError(path / CONFIG, f"{names[key]!r} {problem}")
        return SettingError(path, f"{key} {problem}")

    metadata = Metadata(path, values, complain)
    vocab_size = metadata.require_int(f"{architecture}.vocab_size", 1, 1 << 22)
    values |= read_tokenizer(path, config, vocab_size)
    stored: dict[str, StoredTensor] = {}
    file_bytes = 0
    for file in weight_files(path):
        size, tensors = read_tensors(file)
        repeated = next((name for name in tensors if name in stored), None)
        if repeated is not None:
            raise SettingError(file, f"tensor {repeated!r} occurs in another file too")
        stored |= tensors
        file_bytes += size
    stored = {name: one for name, one in stored.items() if not name.startswith(mapping.left_out)}
    quantization = quantization_of(path, config)
    if quantization is not None:
        if mapping.ranked_qkv is not None:
            stored = cut_in_parts(path, stored, mapping.ranked_qkv, quantization)
        stored = with_packed(path, with_packed_experts(path, stored), quantization)
        if quantization["quant_method"] in FLOATS:
            stored = with_scales(path, stored, quantization)
    if mapping.wrapped_in is not None:
        stored = text_tensors(stored)
    stored = with_prefixes(stored, mapping.renamed)
    if mapping.next_token is not None:
        stored = _with_block(stored, values, architecture, metadata, mapping.next_token)
    settle_head(path, config, stored, tied_by_default=mapping.tied_by_default)
    return HuggingFaceFolder(path, architecture, mapping, metadata, stored, file_bytes)


def _with_block(
    stored: dict[str, StoredTensor],
    values: dict[str, MetadataValue],
    architecture: str,
    metadata: Metadata,
    names: NextTokenNames,
) -> dict[str, StoredTensor]:
    """Returns the tensors, with the next-token block's tensors after those of the last layer. Counts the block in
    `values`, the metadata's contents, if config.json does not count it."""
    blocks, count = f"{architecture}.block_count", f"{architecture}.{n.NEXTN_LAYERS}"
    num_blocks = metadata.require_int(blocks, 1, 1024)
    num_next = metadata.require_int(count, 0, num_blocks - 1, default=0)
    appended = names.appended(stored, num_blocks - num_next)
    if appended is None or (num_next == 0 and not names.prefixes):
        return stored
    if num_next == 0:
        values[blocks], values[count] = num_blocks + 1, 1
    return appended
