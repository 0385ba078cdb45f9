"""Opens the CPU pool of a configuration, and checks that weights fit in RAM."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from moeserve.config import ServerConfig
from moeserve.config.engine_config import MEASURED
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kernels import _C
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.models.sources.source import ModelSource
from moeserve.processes.free_memory import available_bytes, limit_note
from moeserve.quantization import QUANT_TYPES
from moeserve.worker.loading.cpu.kept_speeds import kept_speeds
from moeserve.worker.loading.cpu.thread_placement import place_threads

log = logging.getLogger(__name__)


def open_stream(config: ServerConfig) -> CpuStream:
    """Opens the pool. Raises ConfigError if the CPU lacks `config.isa` or has too few cores for the threads."""
    placements = place_threads(config.threads or 1, config.numa_nodes, config.cpu_binding)
    try:
        return CpuStream(placements, "" if config.isa in MEASURED else config.isa)
    except ValueError as error:
        raise ConfigError(f"--isa or MOESERVE_ISA: {error}; leave it out, or say auto") from error


def choose_products(stream: CpuStream, config: ServerConfig, source: ModelSource) -> str:
    """Lets the pool choose the fastest form of products by measurement, unless `--isa` names an instruction set. Uses
    the speeds that an earlier start kept on disk, except with `--isa measure`. Weights used in place (a memory-mapped
    file) get the newest instruction set, without measurement.

    Returns a description of the choice, empty if nothing was chosen."""
    if config.isa not in MEASURED or config.weight_layout == "file":
        return ""
    num_bytes = Counter[int]()
    for tensor in source.tensors.values():
        num_bytes[tensor.type.number] += tensor.nbytes
    kept = kept_speeds(stream)
    known = {} if config.isa == "measure" else kept.read()
    types = [kind for kind, _ in num_bytes.most_common()]
    speeds = stream.choose_products(types, num_bytes.total(), known=known)
    measured = dict[int, list[list[float]]]()
    for speed in speeds:
        if not speed.is_known:
            measured.setdefault(speed.type, []).append(speed.speeds)
    kept.add(measured)
    return _told(stream, [speed for speed in speeds if speed.form != stream.isa], kept.date)


def _told(stream: CpuStream, chosen: Sequence[_C.ProductSpeed], date: str) -> str:
    """Logs which products are computed in another form, and returns their description. date: day of the kept
    speeds."""
    if not chosen:
        return ""
    told = list[str]()
    for form in dict.fromkeys(speed.form for speed in chosen):
        of_form = [speed for speed in chosen if speed.form == form]
        for is_known, origin in ((False, "by measurement"), (True, f"by a measurement kept from {date}")):
            products = ", ".join(_product(speed) for speed in of_form if speed.is_known == is_known)
            if products:
                log.info("faster with %s than with %s, %s: %s", form, stream.isa, origin, products)
        names = dict.fromkeys(QUANT_TYPES[speed.type].name for speed in of_form)
        told.append(f"{form} for {_numbers(of_form)} of {', '.join(names)}")
    kept = f", kept from {date}" if all(speed.is_known for speed in chosen) else ""
    return f"{' and '.join(told)} by measurement{kept}"


def _numbers(chosen: Sequence[_C.ProductSpeed]) -> str:
    """Returns the numbers of tokens in words, as "few tokens"."""
    are_few = {speed.tokens <= _C.FEW_TOKENS for speed in chosen}
    if are_few == {True}:
        return "few tokens"
    return (
        f"up to {_C.SOME_TOKENS} tokens"
        if True in are_few
        else f"{_C.FEW_TOKENS + 1} to {_C.SOME_TOKENS} tokens"
    )


def _product(speed: _C.ProductSpeed) -> str:
    tokens = "1 token" if speed.tokens == 1 else f"{speed.tokens} tokens"
    if speed.tokens > _C.FEW_TOKENS:
        tokens = f"{_C.FEW_TOKENS + 1} to {_C.SOME_TOKENS} tokens"
    return f"{QUANT_TYPES[speed.type].name} with {tokens} ({max(speed.speeds):.2f} times as fast)"


def check_ram(weight_bytes: int, remedy: str = "or leave more experts to the GPU") -> None:
    """Raises ConfigError if fewer than `weight_bytes` bytes are free."""
    free = available_bytes()
    if weight_bytes > free:
        raise ConfigError(
            f"the model's weights take {weight_bytes / GIB:.1f} GiB and {free / GIB:.1f} GiB of memory are "
            f"free{limit_note()}: "
            f"free some memory, choose a smaller model or quantisation, {remedy}"
        )
