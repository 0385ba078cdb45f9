"""docs/reference/coming-from.md: the flags, commands, variables and metrics of other servers beside ours.

What a flag becomes here is what the command line makes of it; this file says only whose flag it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from moeserve.cli.flag_advice import ADVICE, BY_SERVER
from moeserve.cli.other_flags import UNDERSTOOD, VALUES
from moeserve.httpserver.observability.vllm_metrics import SHARED


class Program(NamedTuple):
    title: str
    understood: tuple[str, ...]  # flags where ours has another name
    commands: Mapping[str, str] = {}  # theirs: ours
    variables: Mapping[str, str] = {}
    metrics: Mapping[str, str] = {}

    @property
    def flags(self) -> tuple[str, ...]:
        """Its flags that have another name here, and those about which there is advice."""
        advice = BY_SERVER.get(self.title, ())
        return (*self.understood, *(flag for _, flags in advice for flag in flags.split()))


PROGRAMS: Final = (
    Program(
        "llama.cpp",
        (
            *("-m", "-hf", "-hfr", "--hf-repo", "-a", "--alias", "-mm", "-c", "--ctx-size", "-np"),
            *("-t", "-s", "-ngl", "--gpu-layers", "--ssl-key-file", "--ssl-cert-file"),
            *("--chat-template-file", "-md", "--model-draft", "--spec-draft-model"),
        ),
        {
            "`llama-server -m FILE`": "`moeserve FILE`",
            "`llama-server --lora FILE`": "`moeserve MODEL --lora-modules NAME=FILE`",
            "`llama-server --models-preset FILE`": "`moeserve serve A B C`, or `--models-file FILE` of another form",
            "`llama-cli -m FILE`": "`moeserve run FILE`",
            "`llama-cli -m FILE -p TEXT -no-cnv`": "`moeserve run FILE TEXT`",
            "`llama-bench`": "`moeserve bench engine`",
            "`llama-perplexity`": "`prompt_logprobs` of a request",
        },
        metrics={
            "llamacpp:prompt_tokens_total": "moeserve:prompt_tokens_total",
            "llamacpp:tokens_predicted_total": "moeserve:generation_tokens_total",
            "llamacpp:requests_processing": "moeserve:num_requests_running",
            "llamacpp:requests_deferred": "moeserve:num_requests_waiting",
            "llamacpp:prompt_seconds_total": "moeserve:request_prefill_time_seconds_sum",
            "llamacpp:tokens_predicted_seconds_total": "moeserve:request_decode_time_seconds_sum",
            "llamacpp:n_decode_total": "moeserve:engine_steps_total",
        },
    ),
    Program(
        "Ollama",
        (),
        {
            "`ollama serve`": "`moeserve serve NAME`; several names: loaded and unloaded in turn, as Ollama does",
            "`ollama run NAME`": "`moeserve run NAME`; names are the Hub's, `org/repo:Q4_K_M`",
            "`ollama pull NAME`": "`moeserve pull NAME`",
            "`ollama list`": "`moeserve list`",
            "`ollama show NAME`": "`moeserve show NAME`",
            "`ollama rm NAME`": "`moeserve rm NAME`",
            "`ollama ps`": "`GET /api/ps`",
            "`ollama stop NAME`": "`POST /models/unload`, of a server with several models",
            "`ollama launch AGENT`": "`moeserve launch AGENT`",
            "`ollama create`, Modelfile": "`--chat-template`, `--override-generation-config`, and the request's fields",
            "`POST /api/pull`, `DELETE /api/delete`": "the same, with `--pull allow`",
        },
        {
            "`OLLAMA_HOST`": "`--host`, `--port`",
            "`OLLAMA_CONTEXT_LENGTH`": "`--max-model-len`",
            "`OLLAMA_NUM_PARALLEL`": "`--max-num-seqs`",
            "`OLLAMA_MAX_QUEUE`": "`--max-num-queued-reqs`",
            "`OLLAMA_ORIGINS`": "`--allowed-origin`",
            "`OLLAMA_KV_CACHE_TYPE`": "`--kv-cache-dtype`",
            "`OLLAMA_MODELS`": "`HF_HUB_CACHE`",
            "`OLLAMA_NOHISTORY`": "`moeserve run --no-history`",
            "`OLLAMA_KEEP_ALIVE`": "`--model-idle-timeout`, with several models; a single one stays loaded",
            "`OLLAMA_MAX_LOADED_MODELS`": "`--models-memory`, in GiB",
            "`OLLAMA_LOAD_TIMEOUT`": "`--model-load-timeout`, with several models",
            "`OLLAMA_FLASH_ATTENTION`": "none: it is always on",
        },
    ),
    Program(
        "vLLM",
        ("--tensor-parallel-size", "-tp", "--uvicorn-log-level", "--otlp-traces-endpoint", "-sc"),
        {
            "`vllm serve NAME`": "`moeserve NAME`",
            "`vllm chat`": "`moeserve run --url URL`",
            "`vllm complete`": "`POST /v1/completions`",
            "`vllm bench serve`": "`moeserve bench serve`",
            "`vllm bench latency`, `throughput`": "`moeserve bench engine`",
        },
        metrics={
            f"vllm:{theirs}": f"moeserve:{ours}"
            for ours, older in SHARED.items()
            for theirs in (ours, *older)
        },
    ),
    Program(
        "SGLang",
        (
            *("--model-path", "--context-length", "--max-running-requests", "--max-queued-requests"),
            *("--max-loras-per-batch", "--tp", "--tp-size", "--random-seed", "--watchdog-timeout"),
            *("--speculative-draft-model-path",),
        ),
        {
            "`python -m sglang.launch_server --model-path NAME`": "`moeserve NAME`",
            "`python -m sglang.bench_serving`": "`moeserve bench serve`",
            "`GET /get_load`": "`GET /v1/loads`",
        },
        metrics={
            "sglang:prompt_tokens_total": "moeserve:prompt_tokens_total",
            "sglang:generation_tokens_total": "moeserve:generation_tokens_total",
            "sglang:cached_tokens_total": "moeserve:prefix_cache_hits_total",
            "sglang:num_running_reqs": "moeserve:num_requests_running",
            "sglang:num_queue_reqs": "moeserve:num_requests_waiting",
            "sglang:token_usage": "moeserve:kv_cache_usage_perc",
            "sglang:time_to_first_token_seconds": "moeserve:time_to_first_token_seconds",
            "sglang:inter_token_latency_seconds": "moeserve:inter_token_latency_seconds",
            "sglang:e2e_request_latency_seconds": "moeserve:e2e_request_latency_seconds",
            "sglang:num_aborted_requests_total": "moeserve:num_aborts_total",
        },
    ),
    Program(
        "KTransformers",
        (
            *("--kt-cpuinfer", "--cpu-infer", "--kt-num-gpu-experts"),
            *("--kt-gpu-prefill-token-threshold",),
        ),
    ),
)


def coming_from_page(made: str) -> Iterator[str]:
    yield from (
        "# Coming from another server",
        "",
        made,
        "",
        "`moeserve serve` understands the flags of llama-server, vLLM, SGLang and KTransformers that mean the same",
        "here, and says so in its log. For others it ends with an error that names what takes their place. Flags that",
        "are not listed have the same name here ([flags.md](flags.md)), or are not there. Underscores in a flag are",
        "hyphens. The fields of these servers' APIs are in [compatibility](compatibility/README.md). The names of",
        "counters end with `_total`.",
        "",
        "## Values of flags that have the same name",
        "",
        "`--parallel N` with a number, as of llama-server, is `--max-num-seqs N`. `8k` tokens are 8,000 and `8K`",
        "8,192, as in vLLM, in `--max-model-len`, `--max-num-batched-tokens` and `--max-total-tokens`.",
        "",
        "| flag | value elsewhere | here |",
        "|---|---|---|",
        *(
            f"| `{flag}` | {', '.join(f'`{value}`' for value in values)} | {here} |"
            for flag, meanings in VALUES.items()
            for here, values in _by_meaning(meanings).items()
        ),
        "",
    )
    for program in PROGRAMS:
        yield from (f"## {program.title}", "")
        if program.title == "KTransformers":
            yield from (
                "Its server is [SGLang](#sglang) with these flags. One file or folder has all weights.",
                "",
            )
        yield from _table("command", program.commands)
        yield from _table("variable", program.variables)
        yield from _table("flag", _flags(program.flags))
        yield from _table("metric", {f"`{one}`": f"`{ours}`" for one, ours in program.metrics.items()})
        if program.title == "vLLM":
            yield from ("`/metrics` has all of these under vLLM's names, too.", "")


def _by_meaning(meanings: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Other servers' values by what they become here."""
    by_meaning: dict[str, list[str]] = {}
    for value, meant in meanings.items():
        by_meaning.setdefault("the default" if meant is None else f"`{meant}`", []).append(value)
    return by_meaning


def _flags(flags: tuple[str, ...]) -> dict[str, str]:
    """A row for flags that become the same."""
    by_text: dict[str, list[str]] = {}
    for flag in flags:
        by_text.setdefault(flag_here(flag), []).append(f"`{flag}`")
    return {", ".join(same): text for text, same in by_text.items()}


def flag_here(flag: str) -> str:
    """What the command line makes of it. Raises KeyError for a flag that it does not know."""
    if flag in ("-ngl", "--gpu-layers"):
        return f"`{UNDERSTOOD[flag]}`; 99, all and -1: as much as fits, the default; 0: `--device cpu`"
    return f"`{UNDERSTOOD[flag]}`" if flag in UNDERSTOOD else ADVICE[flag]


def _table(kind: str, rows: Mapping[str, str]) -> Iterator[str]:
    if rows:
        yield from (f"| {kind} | here |", "|---|---|")
        yield from (f"| {theirs} | {ours} |" for theirs, ours in rows.items())
        yield ""
