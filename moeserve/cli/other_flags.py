"""Flags of llama-server, vLLM, SGLang and KTransformers that a user may type: the understood ones, and advice for the
others."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

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
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
    "--chat-template-file": "--chat-template",
    "-tp": "--gpus",
    "--tp": "--gpus",
    "--tp-size": "--gpus",
    "--tensor-parallel-size": "--gpus",
    "--kt-cpuinfer": "--threads",
    "--kt-num-gpu-experts": "--num-gpu-experts",
    "--kt-gpu-prefill-token-threshold": "--gpu-prefill-token-threshold",
}
# Their values that ask for our default, without which a flag of ours stands.
DEFAULTS: Final = {"-c": {"0"}, "--ctx-size": {"0"}}
_WHOLE_MODEL: Final = 99  # layers: what llama.cpp's users write for all of them
_GPU_LAYERS: Final = ("-ngl", "--gpu-layers", "--n-gpu-layers")

_BY_ITSELF = "leave it out: it is always on"
_NO_CODE = "leave it out: code of a model's repository is never run"
_PLACED = "experts are placed automatically; --num-gpu-experts N or --placement-rules FILE override that"
_STEP = "use --max-num-batched-tokens N, which limits the tokens of a step"
_KV = "use --kv-cache-dtype q8_0, which stores keys and values in 8 bits"
_BUDGET = "use --gpu-memory-budget GIB, an amount in GiB"
_NUMA = "leave it out: --threads N sets the number of threads"
_DEFERRAL = "it was removed: it changed the model's output and made nothing faster"
ADVICE: Final = {
    "-fa": _BY_ITSELF,
    "--flash-attn": _BY_ITSELF,
    "--jinja": _BY_ITSELF,
    "--cont-batching": _BY_ITSELF,
    "-cb": _BY_ITSELF,
    "--enable-prefix-caching": _BY_ITSELF,
    "--enable-chunked-prefill": _BY_ITSELF,
    "--enable-auto-tool-choice": _BY_ITSELF,
    "--trust-remote-code": _NO_CODE,
    "-ncmoe": _PLACED,
    "--n-cpu-moe": _PLACED,
    "-cmoe": _PLACED,
    "--cpu-moe": _PLACED,
    "-ot": _PLACED,
    "--override-tensor": _PLACED,
    "-b": _STEP,
    "-ub": _STEP,
    "--batch-size": _STEP,
    "--ubatch-size": _STEP,
    "-ctk": _KV,
    "-ctv": _KV,
    "--cache-type-k": _KV,
    "--cache-type-v": _KV,
    "--gpu-memory-utilization": _BUDGET,
    "--mem-fraction-static": _BUDGET,
    "--chunked-prefill-size": _STEP,
    "--enable-metrics": _BY_ITSELF,
    "--kt-weight-path": "use --model, one file or folder with all weights",
    "--kt-method": "leave it out: the model's file determines it",
    "--kt-threadpool-count": _NUMA,
    "--kt-numa-nodes": _NUMA,
    "--kt-enable-dynamic-expert-update": "leave it out: experts in GPU memory follow the text",
    "--kt-expert-placement-strategy": _PLACED,
    "--no-mmproj-offload": "use --mmproj-device cpu",
    "--mmproj-offload": "leave it out: the vision tower is on the GPU if the model is and there is room",
    "--no-mmproj": "leave it out: without --mmproj there is no vision tower",
    "--mlock": "leave it out: weights are copied into the server's own memory",
    "--no-mmap": "leave it out: weights are copied into memory; only --weight-layout file maps the file",
    "--no-enable-prefix-caching": "use --prefix-cache off",
    "--cpu-offload-gb": "leave it out: experts that do not fit on the GPU stay in RAM",
    "--quantization": "leave it out: the model's file determines it",
    "--dtype": "leave it out: the model's file determines it",
    "--reasoning-format": "use --reasoning-parser, which names how the model marks its reasoning",
    "--draft-max": "use --speculative-config",
    "--max-deferred-experts-per-token": _DEFERRAL,
    "--kt-max-deferred-experts-per-token": _DEFERRAL,
}


def in_our_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with the names of ours for those of others, and a line about each that was changed."""
    words, notes = [], []
    rest = list(arguments)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag not in UNDERSTOOD and flag not in _GPU_LAYERS:
            words.append(f"{flag}{equals}{value}")
            continue
        if not equals and rest:
            value = rest.pop(0)
        ours = _ours(flag, value)
        words += ours
        if flag != "--n-gpu-layers" or ours != [flag, value]:
            notes.append(f"{flag} {value}: taken as {' '.join(ours) or 'the default'}")
    return words, notes


def _ours(flag: str, value: str) -> list[str]:
    if value in DEFAULTS.get(flag, ()):
        return []
    if flag in _GPU_LAYERS:
        if value in ("auto", "all", "-1") or (value.isdecimal() and int(value) >= _WHOLE_MODEL):
            return []  # as much as fits is on the GPU
        if value == "0":
            return ["--device", "cpu"]
    return [UNDERSTOOD.get(flag, flag), value] if value else [UNDERSTOOD.get(flag, flag)]


def hint(unknown: Iterable[str], flags: Iterable[str]) -> str:
    """The end of a message about arguments that no flag takes. flags: ours."""
    known = list(flags)
    for word in unknown:
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            continue
        if flag in ADVICE:
            return f"; {flag}: {ADVICE[flag]}"
        if close := difflib.get_close_matches(flag, [*known, *UNDERSTOOD], 1):
            return f"; did you mean {UNDERSTOOD.get(close[0], close[0])}?"
    return ""
