"""A store of KV pages on disk, and pages for it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from moeserve.kv.disk.fingerprint import Fingerprint
from moeserve.kv.disk.store import PageStore

PAGE_BYTES = 512
FINGERPRINT = Fingerprint(
    kv_version=1,
    model="model.gguf",
    model_hash="00ff",
    architecture="qwen3moe",
    kv_dtype="float16",
    engine="cpu plain panels",
    page_tokens=4,
    page_bytes=PAGE_BYTES,
)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@cache
def page(number: int) -> bytes:
    return random.Random(number).randbytes(PAGE_BYTES)


def write(store: PageStore, number: int) -> list[bytes]:
    return store.write(key(number), memoryview(page(number)))


def open_store(folder: Path, budget: int = 1 << 20, **changes: Any) -> PageStore:
    return PageStore(folder, budget, [replace(FINGERPRINT, **changes)])
