"""Flags of llama-server, vLLM, SGLang and KTransformers: some are translated, with their values; for the others there
is advice."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from moeserve.cli import parser_names
from moeserve.cli.flag_advice import ADVICE

# Another server's flag: ours, whose value means the same.
UNDERSTOOD: Final = {
    "-m": "--model",
    "-hf": "--model",
    "-hfr": "--model",
    "--hf-repo": "--model",
    "--model-path": "--model",
    "-md": "--speculative-model",
    "--model-draft": "--speculative-model",
    "--spec-draft-model": "--speculative-model",
    "--speculative-draft-model-path": "--speculative-model",
    "-a": "--served-model-name",
    "-mm": "--mmproj",
    "--alias": "--served-model-name",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--context-length": "--max-model-len",
    "-np": "--max-num-seqs",
    "--max-running-requests": "--max-num-seqs",
    "-t": "--threads",
    "-ngl": "--n-gpu-layers",
    "--gpu-layers": "--n-gpu-layers",
    "--max-queued-requests": "--max-num-queued-reqs",
    "--max-loras-per-batch": "--max-loras",
    "--watchdog-timeout": "--step-timeout",
    "-s": "--seed",
    "--random-seed": "--seed",
    "--uvicorn-log-level": "--log-level",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "-sc": "--speculative-config",
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
    "--chat-template-file": "--chat-template",
    "-tp": "--gpus",
    "--tp": "--gpus",
    "--tp-size": "--gpus",
    "--tensor-parallel-size": "--gpus",
    "--cpu-infer": "--threads",
    "--kt-cpuinfer": "--threads",
    "--kt-num-gpu-experts": "--num-gpu-experts",
    "--kt-gpu-prefill-token-threshold": "--gpu-prefill-token-threshold",
}
_WHOLE_MODEL: Final = 99  # layers; llama.cpp's users write it for "all layers"
_GPU_LAYERS: Final = ("-ngl", "--gpu-layers", "--n-gpu-layers")
_DEFAULT: Final = None  # the value means our default, so the flag is left out
# Our flag: other servers' values of it, and ours that mean the same.
VALUES: Final[Mapping[str, Mapping[str, str | None]]] = {
    "--tool-call-parser": parser_names.TOOL_CALLS,
    "--reasoning-parser": parser_names.REASONING,
    "--kv-cache-dtype": {
        **dict.fromkeys(("float16", "fp16"), "f16"),
        "bfloat16": "bf16",
        "fp8_e4m3": "fp8",
    },
    "--load-format": dict.fromkeys(("gguf", "safetensors", "hf"), "auto"),
    "--generation-config": {"vllm": "none"},
    "--device": {"none": "cpu"},
    "--log-level": {
        **{name.upper(): name for name in ("debug", "info", "warning", "error")},
        "warn": "warning",
        "critical": "error",
        "trace": "debug",
    },
    "--seed": {"-1": _DEFAULT},
    "--threads": dict.fromkeys(("0", "-1"), _DEFAULT),
    "--max-model-len": dict.fromkeys(("0", "-1", "auto"), _DEFAULT),
}
# What to do for several values.
_SEVERAL: Final = {
    **dict.fromkeys(("--api-key", "--allowed-origin"), ": repeat the flag for more"),
    "--served-model-name": ": the model has one name",
    "--model": ": name several models before all flags",
}
# vLLM's numbers with a unit: 8k is 8,000, and 8K is 8,192.
_IN_UNITS: Final = ("--max-model-len", "--max-num-batched-tokens", "--max-total-tokens")
_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmM])")
_UNITS: Final = {"k": 1000, "K": 1 << 10, "m": 1_000_000, "M": 1 << 20}


def in_our_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments with other servers' flags and values replaced by moeserve's, and a line about each change.
    As in those servers, underscores in a flag are read as hyphens."""
    words, notes = [], []
    rest = list(arguments)
    while rest:
        typed, equals, value = rest.pop(0).partition("=")
        flag = typed.replace("_", "-") if typed.startswith("--") else typed
        if not (
            flag in UNDERSTOOD or flag in _GPU_LAYERS or flag in VALUES or flag in (*_IN_UNITS, "--parallel")
        ):
            words.append(f"{flag}{equals}{value}")
            continue
        if not equals and rest:
            value = rest.pop(0)
        ours = _ours(flag, value)
        if ours in ([flag, value], [flag]):
            words += [f"{flag}={value}"] if equals else ours
            continue
        words += ours
        notes.append(f"{flag} {value}: taken as {' '.join(ours) or 'the default'}")
    return words, notes


def _ours(flag: str, value: str) -> list[str]:
    if flag in _GPU_LAYERS:
        if value in ("auto", "all", "-1") or (value.isdecimal() and int(value) >= _WHOLE_MODEL):
            return []  # as many layers as fit are on the GPU anyway
        if value == "0":
            return ["--device", "cpu"]
    if flag == "--parallel" and value.isdecimal():
        return ["--max-num-seqs", value]  # llama.cpp's flag for the number of requests answered together
    ours = UNDERSTOOD.get(flag, flag)
    meant = VALUES.get(ours, {}).get(value, value)
    if meant is _DEFAULT:
        return []
    if ours in _IN_UNITS and (number := _NUMBER.fullmatch(meant)):
        meant = str(int(float(number[1]) * _UNITS[number[2]]))
    return [ours, meant] if meant else [ours]


def hint(unknown: Iterable[str], flags: Iterable[str], arguments: Sequence[str] = ()) -> str:
    """Returns the end of an error message about unknown arguments: advice about each flag for which there is some; else
    the most similar flag; else, for a value that belongs to no flag, that the flag before it takes only one value. ""
    if nothing is known. flags: moeserve's. arguments: the whole command line."""
    known, unknown = list(flags), list(unknown)
    typed = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if said := "".join(f"; {flag}: {ADVICE[flag]}" for flag in dict.fromkeys(typed) if flag in ADVICE):
        return said
    for flag in typed:
        if close := difflib.get_close_matches(flag, _of_its_length(flag, [*known, *UNDERSTOOD]), 1):
            return f"; did you mean {UNDERSTOOD.get(close[0], close[0])}?"
    return "" if typed else _too_many(unknown, known, arguments)


def _too_many(words: Sequence[str], known: Sequence[str], arguments: Sequence[str]) -> str:
    """Returns advice about a second value: vLLM's flags for keys, origins and names take several."""
    for at, word in enumerate(arguments):
        if word in words:
            flag = next((one for one in reversed(arguments[:at]) if one.startswith("--")), "").partition("=")[
                0
            ]
            return f"; {flag} takes one value{_SEVERAL.get(flag, '')}" if flag in known else ""
    return ""


def _of_its_length(flag: str, names: Iterable[str]) -> list[str]:
    """Returns the flags that may be suggested for a name. A short flag is suggested only for a short name: too many are
    similar otherwise."""
    return [name for name in names if name.startswith("--") == flag.startswith("--")]
