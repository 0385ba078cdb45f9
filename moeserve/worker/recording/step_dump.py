"""Writes the first steps of a worker to disk for debugging (`--debug-dump`): each layer's tensors and the logits.

When off, it costs one comparison per step. When on, a step waits after each layer and writes about a megabyte per
row. After the last requested step it has no further effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moeserve import __version__
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.messages.steps import Sampled, WorkerReady
from moeserve.models.interface import ModelShape
from moeserve.models.observer import LayerRouting
from moeserve.worker.recording.dump_format import (
    CONTEXTS,
    DESCRIPTION,
    EMBEDDING,
    LOGITS,
    POSITIONS,
    PREVIOUS,
    SAMPLED,
    SAMPLED_ROWS,
    SLOTS,
    TOKENS,
    DumpShape,
    StepFile,
    context_hashes,
    of_layer,
    step_bytes,
    step_path,
    step_tensors,
    write_description,
)
from moeserve.worker.sequences import Sequences, StepLayout

log = logging.getLogger(__name__)

STEPS = 8
MB = 1e6


def open_dump(config: ServerConfig, model: ModelShape, rows: int) -> StepDump | None:
    """Creates the folder of the dump that the flags ask for, and returns the dump; None without the flags. rows: of the
    largest step.

    Raises ConfigError for a folder that cannot be used.
    """
    if config.debug_dump is None:
        if config.debug_dump_steps is not None:
            raise ConfigError("--debug-dump-steps has no effect alone; name a folder with --debug-dump")
        return None
    dense = [index for index, layer in enumerate(model.layers) if layer.moe is None]
    shape = DumpShape(
        model.num_layers,
        model.hidden_size,
        model.num_experts,
        model.top_k,
        model.vocab_size,
        tuple(dense),
        model.residual_width // model.hidden_size,
    )
    folder, steps = Path(config.debug_dump), config.debug_dump_steps or STEPS
    _claim(folder)
    most = steps * step_bytes(shape, rows, config.max_num_seqs)
    log.warning(
        "the first %d steps are slow: they are dumped to %s, %.2f MB a token, at most %.0f MB in all (%.0f are "
        "free); --debug-dump-steps and --max-num-batched-tokens make it less",
        steps, folder, step_bytes(shape, 1, 0) / MB, most / MB, shutil.disk_usage(folder).free / MB,
    )  # fmt: skip
    placement = {name: getattr(config, name) for name in ("num_gpu_experts", "load_format", "isa")}
    return StepDump(folder, steps, shape, {"model": config.model, "version": __version__, **placement})


def _claim(folder: Path) -> None:
    """Claims an empty folder for the dump; a folder created here is readable only by its owner."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = next(folder.iterdir(), None)
    except OSError as error:
        raise ConfigError(
            f"--debug-dump: {folder} cannot be used: {error.strerror}; name a new folder"
        ) from error
    if content is not None:
        what = "holds a dump already" if (folder / DESCRIPTION).exists() else "is not empty"
        raise ConfigError(f"--debug-dump: {folder} {what}; name a new folder")


class StepDump:
    """Owns the dump's folder. A write error ends the dump, with an error in the log, but not the worker."""

    def __init__(self, folder: Path, steps: int, shape: DumpShape, about: dict[str, Any]) -> None:
        """about: origin of the dump."""
        self._folder, self._steps, self._shape, self._about = folder, steps, shape, about
        self._written = 0
        self._failed = False

    def start(self, layout: StepLayout, sequences: Sequences, ready: WorkerReady) -> StepRecord | None:
        """Returns a record of the step that starts now; None if all requested steps are written."""
        if self._failed or self._written == self._steps:
            return None
        requests = {str(slot): sequences.request_ids[slot] for slot in layout.req_slot.tolist()}
        about = {"step": str(self._written), "requests": json.dumps(requests)}
        try:
            if self._written == 0:
                write_description(
                    self._folder, {**self._about, "engine": ready.device, **dataclasses.asdict(self._shape)}
                )
            needed = step_bytes(self._shape, layout.n, len(layout.sampled_rows))
            free = shutil.disk_usage(self._folder).free
            if needed > free:
                self.fail(f"the next takes {needed / MB:.2f} MB, and {free / MB:.2f} MB are free")
                return None
            forms = step_tensors(self._shape, layout.n, len(layout.sampled_rows))
            record = StepRecord(
                self, StepFile(step_path(self._folder, self._written), forms, about), layout.n
            )
        except OSError as error:
            self.fail(str(error))
            return None
        record.rows(layout, sequences)
        return record

    def finished(self) -> None:
        """Notes that a step was written."""
        self._written += 1
        if self._written == self._steps:
            log.info("the debug dump is complete: %d steps in %s", self._steps, self._folder)

    def fail(self, why: str) -> None:
        """Ends the dump because of an error."""
        self._failed = True
        log.error("the debug dump ends after %d steps: %s", self._written, why)


class StepRecord:
    """One step being written, as the model's `LayerObserver`. Allocates no GPU memory, all of which is planned."""

    def __init__(self, dump: StepDump, file: StepFile, rows: int) -> None:
        self._dump, self._rows = dump, rows
        self._file: StepFile | None = file  # None after a write error

    def rows(self, layout: StepLayout, sequences: Sequences) -> None:
        """Writes the positions, tokens and requests of the rows."""
        hashes = [
            context_hashes(sequences.tokens[slot, : start + count], start)
            for slot, start, count in zip(layout.req_slot, layout.start, layout.count, strict=True)
        ]
        self._write(CONTEXTS, np.concatenate([h[1:] for h in hashes]))
        self._write(PREVIOUS, np.concatenate([h[:-1] for h in hashes]))
        self._write(TOKENS, sequences.tokens[layout.sequence, layout.position])
        self._write(POSITIONS, layout.position)
        self._write(SLOTS, layout.sequence)
        self._write(SAMPLED_ROWS, layout.sampled_rows)

    def embedding(self, x: Tensor) -> None:
        self._show(EMBEDDING, x)

    def layer(self, index: int, *, routing: LayerRouting | None, **tensors: Tensor) -> None:
        of_routing = {} if routing is None else routing._asdict()
        for name, tensor in (tensors | of_routing).items():
            self._show(of_layer(index, name), tensor)

    def logits(self, first: int, logits: Tensor) -> None:
        """Writes logits, float32 [m, vocab], of the sampled rows from `first` on, before the sampler changes them."""
        self._write(LOGITS, logits.cpu().numpy(), first)

    def finish(self, sampled: Sequence[Sampled]) -> None:
        """Writes the step's tokens, and completes the file."""
        self._write(SAMPLED, np.array([s.token_id for s in sampled], np.int32))
        if self._file is not None:
            try:
                self._file.close()
                self._dump.finished()
            except OSError as error:
                self._fail(self._file, error)

    def _show(self, name: str, tensor: Tensor) -> None:
        rows = tensor[: self._rows].cpu()
        self._write(name, (rows.float() if rows.is_floating_point() else rows).numpy())

    def _write(self, name: str, rows: npt.NDArray[Any], first: int = 0) -> None:
        if self._file is not None:
            try:
                self._file.write(name, rows, first)
            except OSError as error:
                self._fail(self._file, error)

    def _fail(self, file: StepFile, error: OSError) -> None:
        self._file = None
        self._dump.fail(str(error))
        with contextlib.suppress(OSError):
            file.abandon()
