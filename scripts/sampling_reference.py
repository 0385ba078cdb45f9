"""docs/reference/sampling-parameters.md: the table of moeserve/sampling/parameters.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from moeserve.sampling.parameters import DEFAULTS, INT32_MAX, PARAMETERS, TYPES, Api, Parameter, Range

TITLES = {
    "openai": "OpenAI: chat and completions",
    "responses": "OpenAI: responses",
    "anthropic": "Anthropic",
    "lightllm": "LightLLM",
    "llama_server": "llama-server",
    "ollama": "Ollama",
}

INTRODUCTION = """\
[generation.md](generation.md#sampling) says in which order the samplers run. `--override-generation-config` takes every
name of the first table, in OpenAI's range; a GGUF file recommends values under the keys of its last column, and a
`generation_config.json` under the names themselves.
""".splitlines()


def sampling_page() -> Iterator[str]:
    """Line by line, without the title."""
    yield from (*INTRODUCTION, "", "| parameter | type | default | sampler | | in a GGUF file |")
    yield "|---|---|---|---|---|---|"
    for name, of in PARAMETERS.items():
        kind = "integer" if TYPES[name] is int else "number"
        key = f"`general.sampling.{of.gguf}`" if of.gguf else ""
        yield f"| `{name}` | {kind} | `{getattr(DEFAULTS, name)}` | `{of.sampler}` | {of.help} | {key} |"
    yield from ("", "Each API's range, and its name for the parameter where that is another:", "")
    apis = [api for api in get_args(Api) if api in TITLES]
    yield f"| parameter | {' | '.join(TITLES[api] for api in apis)} |"
    yield f"|---|{'---|' * len(apis)}"
    for name, of in PARAMETERS.items():
        yield f"| `{name}` | {' | '.join(_in_api(api, name, of) for api in apis)} |"


def _in_api(api: Any, name: str, of: Parameter) -> str:
    if api not in of.apis:
        return ""
    called = of.name_in(api, name)
    return f"{_bounds(of.range_in(api))}{'' if called == name else f' as `{called}`'}"


def _bounds(range: Range) -> str:
    low = f"{'>' if range.without_low else '≥'} {range.low:g}"
    return low if range.high == INT32_MAX else f"{low}, ≤ {range.high:g}"
