"""ServerConfig: the only source of flags, environment names and defaults.

Each field carries its help text, its group in `--help`, its range and its parser. The flag is the field's
name with dashes, the environment variable `MOESERVE_` and the name in capitals; a flag wins over the
environment, which wins over the default. Frozen: what the worker finds out later (how many KV slots fit)
is a message (`WorkerReady`), never a changed config.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

ENV_PREFIX = "MOESERVE_"
GROUPS = ("Model", "Network", "Chat", "Capacity", "Device", "CPU engine", "GPU", "Server")


def _option(
    default: Any,
    group: str,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
) -> Any:
    metadata = {
        "group": group,
        "help": help,
        "low": low,
        "high": high,
        "choices": choices,
        "metavar": metavar,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the user asked for. Paths are absolute; None means "decide from the model and the machine"."""

    model: str = _option(
        "",
        "Model",
        "a .gguf file, the first file of a split set (-00001-of-0000N.gguf), a folder that holds one, or a folder with "
        "config.json, tokenizer.json and *.safetensors; or a name on the Hugging Face Hub, to be downloaded: org/repo, "
        "org/repo:Q4_K_M, org/repo:file.gguf; left out, the small demonstration model that ships with moeserve is "
        "served",
        metavar="MODEL",
    )
    served_model_name: str | None = _option(
        None,
        "Model",
        "the model's name in the API; after commas further names that it answers to (default: the file's name without "
        ".gguf, or that on the hub)",
        metavar="NAME",
    )
    max_model_len: int | None = _option(
        None,
        "Model",
        "longest prompt plus answer of one request, in tokens (default: the model's context length, or what "
        "the KV pool holds if that is less)",
        low=16,
        high=1 << 24,
    )
    load_format: str = _option(
        "auto",
        "Model",
        "auto: the file's weights; dummy: random ones of the file's shapes and types, for benchmarks (the file may end "
        "before its tensors)",
        choices=("auto", "dummy"),
    )
    host: str = _option(
        "127.0.0.1", "Network", "address to listen on; 0.0.0.0 admits other machines, :: those with IPv6, too"
    )
    allowed_host: tuple[str, ...] = _option(
        (),
        "Network",
        "answer under this name too, where --host is a loopback address and there is no API key: else only under "
        "addresses, names without a dot, and .localhost, .local and .internal; give the flag again for more",
        metavar="NAME",
    )
    allowed_origin: tuple[str, ...] = _option(
        (),
        "Network",
        "let web pages of this origin use the API from a browser (CORS), such as https://chat.example.com; * lets all; "
        "give the flag again for more",
        metavar="ORIGIN",
    )
    port: int = _option(
        8000, "Network", "TCP port of the API; 0 takes a free one and logs it", low=0, high=65535
    )
    uds: str | None = _option(
        None, "Network", "listen at this Unix socket instead of an address and a port", metavar="PATH"
    )
    ssl_certfile: str | None = _option(
        None,
        "Network",
        "speak HTTPS with this certificate (PEM), and those that vouch for it",
        metavar="PATH",
    )
    ssl_keyfile: str | None = _option(
        None, "Network", "the certificate's private key (default: in the same file)", metavar="PATH"
    )
    kv_events_endpoint: str | None = _option(
        None,
        "Network",
        "tell gateways here what the prefix cache holds (vLLM's KV events, a ZMQ PUB socket), such as "
        "tcp://127.0.0.1:5557 or ipc:///path; whoever connects can read all prompts and answers",
        metavar="ENDPOINT",
    )
    kv_events_replay_endpoint: str | None = _option(
        None,
        "Network",
        "send gateways here the KV events that they have missed (a ZMQ ROUTER socket)",
        metavar="ENDPOINT",
    )
    kv_events_topic: str = _option(
        "", "Network", "topic of the KV events, by which some gateways tell servers apart", metavar="TOPIC"
    )
    kv_events_format: str = _option(
        "maps",
        "Network",
        "how KV events are written; maps: as vLLM does now; arrays: as it did before, for older gateways",
        choices=("maps", "arrays"),
    )
    kv_events_block_size: int = _option(
        64,
        "Network",
        "tokens of a block in KV events and in vllm:cache_config_info; the same for all servers of a gateway",
        low=1,
        high=65536,
    )
    api_key: tuple[str, ...] = _option(
        (),
        "Network",
        "require this bearer token on every request but /health, /metrics and the web pages; give the flag again (in "
        "the variable: after a comma) for more keys, which get equal shares of a busy server",
        metavar="KEY",
    )
    api_key_file: str | None = _option(
        None, "Network", "file of more API keys: on each line a name and a key", metavar="PATH"
    )
    chat_template: str | None = _option(
        None, "Chat", "file with a chat template (Jinja) to use instead of the model's own", metavar="PATH"
    )
    generation_config: str = _option(
        "none",
        "Chat",
        "sampling parameters of requests that set none; none: the API's own defaults; auto: those that the model "
        "recommends, in generation_config.json or in the GGUF file",
        choices=("none", "auto"),
    )
    override_generation_config: str | None = _option(
        None,
        "Chat",
        'the same by hand, which goes before what the model recommends: {"temperature": 0.7, "top_p": 0.8}',
        metavar="JSON",
    )
    tool_call_parser: str = _option(
        "auto",
        "Chat",
        "how the model writes tool calls; auto: as its chat template shows",
        choices=(
            "auto",
            "hermes",
            "qwen3_coder",
            "glm45",
            "minimax_m2",
            "deepseek_v3",
            "deepseek_v31",
            "harmony",
            "none",
        ),
    )
    reasoning_parser: str = _option(
        "auto",
        "Chat",
        "how the model marks its thoughts (qwen3: <think> and </think>; harmony: gpt-oss's channels); auto: as its "
        "chat template shows",
        choices=("auto", "qwen3", "harmony", "none"),
    )
    unknown_fields: str = _option(
        "ignore",
        "Chat",
        "request fields that the server does not know; ignore: drop them, with a line in the log for each name; warn: "
        "drop them, with a line for each request and their names in the header x-moeserve-ignored-fields; error: "
        "refuse the request",
        choices=("ignore", "warn", "error"),
    )
    data_dir: str | None = _option(
        None, "Chat", "folder that keeps stored responses over a restart (default: in memory)", metavar="PATH"
    )
    max_num_seqs: int = _option(64, "Capacity", "most requests in one step", low=1, high=4096)
    max_total_tokens: int | None = _option(
        None,
        "Capacity",
        "size of the KV pool, in tokens (default: from the free memory, at most max-num-seqs x max-model-len)",
        low=64,
        high=1 << 28,
    )
    max_num_batched_tokens: int | None = _option(
        None,
        "Capacity",
        "tokens in one step: decode rows and prefill chunks together (default: 512 on the CPU; on a GPU up to 8192, as "
        "far as their buffers take no more than 3% of its memory)",
        low=1,
        high=65536,
    )
    max_num_queued_reqs: int = _option(
        2048, "Capacity", "waiting requests beyond which new ones get a 503", low=1, high=1 << 20
    )
    max_num_queued_tokens: int = _option(
        1 << 20, "Capacity", "tokens of waiting prompts beyond which new ones get a 503", low=1, high=1 << 30
    )
    max_itl_ms: float | None = _option(
        None,
        "Capacity",
        "longest step while answers are under way, in milliseconds, which bounds their inter-token latency (default: "
        "as long as prompts need to be read efficiently)",
        low=1,
        high=3.6e6,
        metavar="MS",
    )
    prefill_share: float | None = _option(
        None,
        "Capacity",
        "share of the time that prompts get while answers are under way, which keep the rest of their speed; "
        "more where prompts outnumber answers; 1: prompts come first, in the largest steps, which serves throughput "
        "and lets answers wait for them (default: 0.4, and 1 where all experts are on a GPU)",
        low=0.01,
        high=1,
        metavar="SHARE",
    )
    prefix_cache: str = _option(
        "auto",
        "Capacity",
        "whose computed prompts and answers are used again: shared: everyone's; per-key: those of the same API key; "
        "off: nobody's; auto: per-key where there are API keys, else shared",
        choices=("auto", "shared", "per-key", "off"),
    )
    kv_disk: str | None = _option(
        None,
        "Capacity",
        "folder for the prefix cache's tier on disk: prompts and answers that are computed once are read from there, "
        "after a restart too (CPU engine, models without recurrent state); one server at a time. What was said can be "
        "reconstructed from it",
        metavar="PATH",
    )
    kv_disk_gib: float | None = _option(
        None, "Capacity", "most that --kv-disk takes (default: 10)", low=0.001, high=1e6, metavar="GIB"
    )
    state_snapshot_budget: float | None = _option(
        None,
        "Capacity",
        "memory for snapshots of recurrent state, with which the prefix cache continues conversations; for models that "
        "have such state (default: an eighth of what the weights and the running requests' states leave, at most 4 "
        "snapshots for each of --max-num-seqs)",
        low=0,
        high=1e6,
        metavar="GIB",
    )
    device: str = _option(
        "auto",
        "Device",
        "cuda: the first NVIDIA GPU; cpu: none; auto: a GPU if there is one that can be used",
        choices=("auto", "cpu", "cuda"),
    )
    threads: int | None = _option(
        None,
        "CPU engine",
        "compute threads of the expert pool (default: the physical cores we may use)",
        low=1,
        high=1024,
    )
    isa: str = _option(
        "auto",
        "CPU engine",
        "instruction set of the kernels; auto takes the best this CPU has, the others are for comparing",
        choices=("auto", "plain", "avx2", "avx512_vnni"),
    )
    weight_layout: str = _option(
        "panels",
        "CPU engine",
        "panels: weights are repacked while loading, the faster layout; file: computed from the mapped file as they "
        "lie there, for an instant start and tight memory (do not change the file while it is served)",
        choices=("panels", "file"),
    )
    numa_nodes: int | None = _option(
        None,
        "CPU engine",
        "memory nodes the weights and threads are divided among (default: the machine's; more than it has are "
        "logical nodes, for trying)",
        low=1,
        high=1024,
    )
    cpu_binding: str = _option(
        "auto",
        "CPU engine",
        "cores: each compute thread on a core of its own; nodes: on its memory node's cores; none: wherever the "
        "kernel puts it; auto: cores where there are enough of them, else nodes",
        choices=("auto", "cores", "nodes", "none"),
    )
    num_gpu_experts: int | None = _option(
        None,
        "GPU",
        "experts of each layer that live in GPU memory: the hottest by --expert-heat, else the ids below N (default: "
        "as many as fit)",
        low=0,
        high=4096,
    )
    gpu_memory_budget: float | None = _option(
        None,
        "GPU",
        "GPU memory to use for everything; how many experts fit is computed from the file (default: what is free)",
        low=0.01,
        high=1e6,
        metavar="GIB",
    )
    expert_heat: str | None = _option(
        None,
        "GPU",
        "how often each expert is used, as a server exports it under /v1/experts/heat: the hottest go to the GPU first",
        metavar="PATH",
    )
    placement_rules: str | None = _option(
        None,
        "GPU",
        "YAML file of rules that place tensors by their names; what none of them matches follows the other flags",
        metavar="PATH",
    )
    n_gpu_layers: int | None = _option(
        None,
        "GPU",
        "layers on the GPU, from the last, where not even attention and routers of all fit; the CPU computes "
        "the others (default: as many as fit)",
        low=0,
        high=1024,
    )
    max_deferred_experts_per_token: int = _option(
        0,
        "GPU",
        "so many of a token's least experts, where they are in RAM, are added one layer late, so that the CPU works "
        "while the GPU attends: faster, and not quite the same model",
        low=0,
        high=1024,
    )
    gpu_prefill_token_threshold: int | None = _option(
        None,
        "GPU",
        "from so many tokens in a step on, prompts are read on the GPU, to which the experts in RAM are streamed, and "
        "below by the CPU (default: both at once, each a part of the experts that is measured at the start)",
        low=1,
        high=1 << 20,
    )
    seed: int | None = _option(
        None, "Server", "makes the seeds of requests that set none reproducible", low=0, high=(1 << 63) - 1
    )
    log_level: str = _option(
        "info",
        "Server",
        "how much to log: a line a request at info, its way through the processes at debug",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = _option(
        "text", "Server", "lines to read, or a JSON object a line", choices=("text", "json")
    )
    otlp_endpoint: str | None = _option(
        None,
        "Server",
        "send OpenTelemetry traces of requests to this OTLP/HTTP collector, such as http://localhost:4318 (default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT, else none); needs moeserve[otel]",
        metavar="URL",
    )
    debug_dump: str | None = _option(
        None,
        "Server",
        "write what the first steps compute in every layer to this new folder, to be compared by `moeserve "
        "compare-dumps` (the prompts can be read out of it)",
        metavar="PATH",
    )
    debug_dump_steps: int | None = _option(
        None, "Server", "how many steps --debug-dump writes, which are slow (default: 8)", low=1, high=10000
    )
    on_engine_loss: str = _option(
        "continue",
        "Server",
        "what becomes of the answers under way when the engine crashes and is started again: continue: they go on from "
        "their tokens; fail: they end with an error",
        choices=("continue", "fail"),
    )
    step_timeout: float | None = _option(
        None,
        "Server",
        "seconds without an answer after which the engine counts as hung and is started again (default: 30 and twenty "
        "times what the step was expected to take)",
        low=0.1,
        high=86400,
    )
    max_engine_crashes: int = _option(
        3, "Server", "crashes of the engine within a minute that end the server", low=1, high=1000
    )
    drain_delay: float = _option(
        0.0,
        "Server",
        "seconds after SIGTERM in which /health/ready already says no and requests are still taken, so that a load "
        "balancer notices first",
        low=0,
        high=3600,
    )
    shutdown_timeout: float = _option(
        30.0, "Server", "seconds that running requests are given to finish after SIGTERM", low=0, high=86400
    )


def env_name(field_name: str) -> str:
    return ENV_PREFIX + field_name.upper()


def to_json_dict(config: ServerConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)
