"""The CPU engine with LoRA adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kv.cache import KvCache
from moeserve.kv.layout import KvLayout
from moeserve.models.adapters.adapter import Adapter
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.blocks.cpu.decoder import CpuDecoder
from moeserve.models.blocks.cpu.lora import CpuAdapters
from moeserve.models.blocks.cpu.workspace import CpuBatch
from moeserve.models.loading.cpu_loader import CpuLoader
from moeserve.models.open import open_model
from moeserve.models.registry import read_shape
from moeserve.worker.engines.cpu.engine import adapter_rows

LENGTHS = (24, 17, 31, 9)  # of the sequences of a step
MOST = sum(LENGTHS)
PROMPTS = [[(37 * i * i + 11 * i + 5 * s) % 4000 for i in range(n)] for s, n in enumerate(LENGTHS)]


class Engine:
    """A model with adapters; each call is one step of several whole sequences."""

    def __init__(self, path: Path, adapters: list[Adapter], isa: str = "", threads: int = 2) -> None:
        self.file = open_model(path)
        self.shape = c = read_shape(self.file)
        self.stream = CpuStream(threads, isa)
        weights = CpuLoader(self.stream, self.file, c, lambda *_: None).load()
        kv = KvCache(KvLayout(c), MOST, range(c.num_layers)).layers
        self.model = CpuDecoder(
            c,
            weights,
            self.stream,
            kv,
            MOST,
            MOST,
            adapters=CpuAdapters(c, adapters, MOST) if adapters else None,
        )

    def logits(self, prompts: list[list[int]], adapters: list[int]) -> list[torch.Tensor]:
        """Each sequence's logits, float32 [its length, vocab]. adapters: the adapter of each sequence, -1 for none."""
        counts = np.array([len(prompt) for prompt in prompts], np.int32)
        rows = (np.cumsum(counts) - counts).astype(np.int32)
        n = int(counts.sum())
        table = np.zeros((len(prompts), MOST), np.int32)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            table[i, :count] = np.arange(row, row + count)
        zeros = np.zeros(len(prompts), np.int32)
        which = np.arange(len(prompts), dtype=np.int32)
        of_rows = adapter_rows(np.repeat(np.array(adapters, np.int32), counts))
        self.model.begin(
            torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32), of_rows
        )
        self.model.plan_attention(rows, counts, zeros, which, table)
        batch = CpuBatch(
            n=n,
            positions=torch.cat([torch.arange(int(count), dtype=torch.int32) for count in counts]),
            kv_slots=torch.arange(n, dtype=torch.int32),
            adapters=of_rows,
        )
        self.model.forward(batch)
        found = []
        for first in range(0, n, 32):
            part = self.model.logits(torch.arange(first, min(first + 32, n), dtype=torch.int32))
            self.stream.wait()
            found.append(part.clone())
        return list(torch.cat(found).split(counts.tolist()))


def adapter_of(folder: Path, model: Path) -> Adapter:
    return PeftAdapter(folder.name, folder, read_shape(open_model(model))).read()
