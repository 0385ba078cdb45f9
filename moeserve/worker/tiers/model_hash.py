"""Identifies a model without reading its whole file."""

from __future__ import annotations

import hashlib
import mmap

from moeserve.models.sources.source import ModelSource

SAMPLE_BYTES = 4096
SAMPLES_OF_A_FILE = 1024  # for a Hugging Face folder, whose tensors are converted while being read


def model_hash(source: ModelSource, *, dummy: bool) -> str:
    """Returns a hash of the metadata, of every tensor's name, shape and dtype, and of samples of the weights. A
    single changed number inside a tensor may go unnoticed; another model, quantisation or fine-tune does not.

    dummy: the weights are random; the file may end before its tensors.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((dummy, source.architecture, source.file_bytes)).encode())
    for key, value in sorted(source.metadata.items()):
        if isinstance(value, int | float | str):
            digest.update(repr((key, value)).encode())
    for name, info in sorted(source.tensors.items()):
        digest.update(repr((name, info.shape, info.type.name)).encode())
        if source.is_mapped and not dummy:
            _add_samples(digest, source.data(name).reshape(-1).data, 3)
    if not source.is_mapped and not dummy:
        for path in sorted(source.path.glob("*.safetensors")):
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _add_samples(digest, memoryview(data), SAMPLES_OF_A_FILE)
    return digest.hexdigest()


def _add_samples(digest: hashlib.blake2b, data: memoryview, count: int) -> None:
    with data:
        for index in range(count):
            start = max(len(data) - SAMPLE_BYTES, 0) * index // (count - 1)
            digest.update(data[start : start + SAMPLE_BYTES])
