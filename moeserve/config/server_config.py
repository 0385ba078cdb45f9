"""ServerConfig: every option of the server."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config.option import option
from moeserve.config.speculative import SpeculativeConfig


@dataclass(frozen=True, slots=True)
class ServerConfig(SpeculativeConfig):
    """What the user asked for. Paths are absolute; None means "decide from the model and the machine"."""

    model: str = option(
        "",
        "Model",
        "a .gguf file, the first file of a split set (-00001-of-0000N.gguf), a folder that holds one, or a folder with "
        "config.json, tokenizer.json and *.safetensors; or a name on the Hugging Face Hub, to be downloaded: org/repo, "
        "org/repo:Q4_K_M, org/repo:file.gguf, org/repo@revision; left out, the small demonstration model that ships "
        "with moeserve is served",
        metavar="MODEL",
    )
    served_model_name: str | None = option(
        None,
        "Model",
        "the model's name in the API; after commas further names that it answers to (default: the file's name without "
        ".gguf, or that on the hub)",
        metavar="NAME",
    )
    max_model_len: int | None = option(
        None,
        "Model",
        "longest prompt plus answer of one request, in tokens (default: the model's context length, or what "
        "the KV pool holds if that is less)",
        low=16,
        high=1 << 24,
    )
    load_format: str = option(
        "auto",
        "Model",
        "auto: the file's weights; dummy: random ones of the file's shapes and types, for benchmarks (the file may end "
        "before its tensors)",
        choices=("auto", "dummy"),
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "Model",
        "serve LoRA adapters beside the model (PEFT's folders, llama.cpp's GGUF files), each as a model of its own "
        "name; further pairs may follow, or give the flag again (CPU, or one GPU)",
        metavar="NAME=PATH",
        several=True,
    )
    lora_dir: str | None = option(
        None,
        "Model",
        "allow LoRA adapters that lie in this folder to be loaded and unloaded while the server runs: whoever may use "
        "the server may POST to /v1/load_lora_adapter and /v1/unload_lora_adapter (CPU, or one GPU)",
        metavar="PATH",
    )
    max_loras: int | None = option(
        None,
        "Model",
        "adapters that there may be at once with --lora-dir, those of --lora-modules among them (default: 16)",
        low=1,
        high=1024,
    )
    lora_memory: float | None = option(
        None,
        "Model",
        "memory that is kept free for adapters of --lora-dir (default: 1)",
        low=0.001,
        high=1e6,
        metavar="GIB",
    )
    max_num_seqs: int = option(64, "Capacity", "most requests in one step", low=1, high=4096)
    max_total_tokens: int | None = option(
        None,
        "Capacity",
        "size of the KV pool, in tokens (default: from the free memory, at most max-num-seqs x max-model-len)",
        low=64,
        high=1 << 28,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Capacity",
        "tokens in one step: decode rows and prefill chunks together (default: 512 on the CPU; on a GPU up to 8192, as "
        "far as their buffers take no more than 3% of its memory)",
        low=1,
        high=65536,
    )
    max_num_queued_reqs: int = option(
        2048, "Capacity", "waiting requests beyond which new ones get a 503", low=1, high=1 << 20
    )
    max_num_queued_tokens: int = option(
        1 << 20, "Capacity", "tokens of waiting prompts beyond which new ones get a 503", low=1, high=1 << 30
    )
    max_itl_ms: float | None = option(
        None,
        "Capacity",
        "longest step while answers are under way, in milliseconds, which bounds their inter-token latency (default: "
        "as long as prompts need to be read efficiently)",
        low=1,
        high=3.6e6,
        metavar="MS",
    )
    prefill_share: float | None = option(
        None,
        "Capacity",
        "share of the time that prompts get while answers are under way, which keep the rest of their speed; "
        "more where prompts outnumber answers; 1: prompts come first, in the largest steps, which serves throughput "
        "and lets answers wait for them (default: 0.4; 0.5 where prompts bring experts from "
        "RAM to a GPU; 1 where all experts are on a GPU)",
        low=0.01,
        high=1,
        metavar="SHARE",
    )
    prefix_cache: str = option(
        "auto",
        "Capacity",
        "whose computed prompts and answers are used again: shared: everyone's; per-key: those of the same API key; "
        "off: nobody's; auto: per-key where there are API keys, else shared",
        choices=("auto", "shared", "per-key", "off"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "Capacity",
        "how keys and values are kept; f16: 16 bits each, which auto is; q8_0: 8 bits and a scale for each 32, so that "
        "nearly twice as many tokens fit, at a small loss of accuracy; on a GPU also bf16, and fp8: e4m3 and a scale "
        "for a token's head, a little smaller than q8_0 and less accurate; MLA has f16 alone",
        choices=("auto", "f16", "bf16", "q8_0", "fp8"),
    )
    kv_ram: float | None = option(
        None,
        "Capacity",
        "memory for the prefix cache's tier in RAM, with a GPU: prompts and answers that its KV pool has given up are "
        "copied back from there; 0: none (default: a quarter of the RAM that is free after the weights, at most 4 "
        "times the KV pool; none where that is less than the pool, whose pages it has, too, and none where windowed "
        "layers have a pool of their own)",
        low=0,
        high=1e6,
        metavar="GIB",
    )
    kv_disk: str | None = option(
        None,
        "Capacity",
        "folder for the prefix cache's tier on disk: prompts and answers that are computed once are read from there, "
        "after a restart too; one server at a time. What was said can be reconstructed from it",
        metavar="PATH",
    )
    kv_disk_gib: float | None = option(
        None, "Capacity", "most that --kv-disk takes (default: 10)", low=0.001, high=1e6, metavar="GIB"
    )
    kv_window_ratio: float | None = option(
        None,
        "Capacity",
        "share of the KV memory for a pool of the layers that attend to the last tokens alone, as every other one of "
        "gpt-oss; 0: all layers have one pool (default: a third as many tokens as the other layers' pool; one pool "
        "where two would hold no more, with several GPUs, with --kv-ram or --kv-disk, and where the first layers are "
        "the CPU's)",
        low=0,
        high=0.9,
        metavar="SHARE",
    )
    state_snapshot_budget: float | None = option(
        None,
        "Capacity",
        "memory for snapshots of recurrent state, with which the prefix cache continues conversations; for models that "
        "have such state (default: an eighth of what the weights and the running requests' states leave, at most 4 "
        "snapshots for each of --max-num-seqs)",
        low=0,
        high=1e6,
        metavar="GIB",
    )
    device: str = option(
        "auto",
        "Device",
        "cuda: the first NVIDIA GPU; cpu: none; auto: a GPU if there is one that can be used",
        choices=("auto", "cpu", "cuda"),
    )
    gpus: str = option(
        "1",
        "Device",
        "NVIDIA GPUs among which the model is divided: how many, from the first, or their numbers with commas, as 0,2",
        metavar="N",
    )
    parallel: str = option(
        "auto",
        "Device",
        "how it is divided among several GPUs: tensor: each has some of the heads and experts of every layer; layers: "
        "each has some of the layers; auto: tensor, but layers where the model's layers cannot be divided or the GPUs "
        "do not reach one another's memory",
        choices=("auto", "layers", "tensor"),
    )
    worker: str | None = option(
        None,
        "Network",
        "compute on another machine, where `moeserve worker` listens at this address; --model names the same model "
        "here, of which the beginning up to the weights suffices",
        metavar="HOST:PORT",
    )
    worker_ssl_certfile: str | None = option(
        None, "Network", "this server's certificate for --worker (PEM)", metavar="PATH"
    )
    worker_ssl_keyfile: str | None = option(
        None, "Network", "that certificate's private key (default: in the same file)", metavar="PATH"
    )
    worker_ssl_ca_certs: str | None = option(
        None,
        "Network",
        "certificates (PEM) of the authority that vouches for the worker; no other worker is spoken to",
        metavar="PATH",
    )
    threads: int | None = option(
        None,
        "CPU engine",
        "compute threads of the expert pool (default: the physical cores we may use; of 8 or more, one less where "
        "there is a GPU, whose own thread has it)",
        low=1,
        high=1024,
    )
    isa: str = option(
        "auto",
        "CPU engine",
        "instruction set of the kernels; auto takes the best this CPU has, the others are for comparing",
        choices=("auto", "plain", "avx2", "avx512_vnni"),
    )
    weight_layout: str = option(
        "panels",
        "CPU engine",
        "panels: weights are repacked while loading, the faster layout; file: computed from the mapped file as they "
        "lie there, for an instant start and tight memory (do not change the file while it is served)",
        choices=("panels", "file"),
    )
    numa_nodes: int | None = option(
        None,
        "CPU engine",
        "memory nodes the weights and threads are divided among (default: the machine's; more than it has are "
        "logical nodes, for trying)",
        low=1,
        high=1024,
    )
    cpu_binding: str = option(
        "auto",
        "CPU engine",
        "cores: each compute thread on a core of its own; nodes: on its memory node's cores; none: wherever the "
        "kernel puts it; auto: cores where there are enough of them, else nodes",
        choices=("auto", "cores", "nodes", "none"),
    )
    num_gpu_experts: int | None = option(
        None,
        "GPU",
        "experts of each layer that live in GPU memory: the hottest by --expert-heat, else the ids below N (default: "
        "as many as fit)",
        low=0,
        high=4096,
    )
    gpu_memory_budget: float | None = option(
        None,
        "GPU",
        "GPU memory to use for everything; how many experts fit is computed from the file (default: what is free)",
        low=0.01,
        high=1e6,
        metavar="GIB",
    )
    expert_heat: str | None = option(
        None,
        "GPU",
        "how often each expert is used, as a server exports it under /v1/experts/heat: the hottest go to the GPU first",
        metavar="PATH",
    )
    placement_rules: str | None = option(
        None,
        "GPU",
        "YAML file of rules that place tensors by their names; what none of them matches follows the other flags",
        metavar="PATH",
    )
    n_gpu_layers: int | None = option(
        None,
        "GPU",
        "layers on the GPU, from the last, where not even attention and routers of all fit; the CPU computes "
        "the others (default: as many as fit)",
        low=0,
        high=1024,
    )
    expert_cache: str = option(
        "auto",
        "GPU",
        "experts in GPU memory follow the text: those that it uses take the places of those that it does not. auto: "
        "where not all experts fit the GPU and RAM has room for all of them; off: they stay as they are placed",
        choices=("auto", "off"),
    )
    max_deferred_experts_per_token: int = option(
        0,
        "GPU",
        "so many of a token's least experts, where they are in RAM, are added one layer late, so that the CPU works "
        "while the GPU attends: faster, and not quite the same model",
        low=0,
        high=1024,
    )
    gpu_prefill_token_threshold: int | None = option(
        None,
        "GPU",
        "from so many tokens in a step on, prompts are read on the GPU, to which the experts in RAM are streamed, and "
        "below by the CPU (default: both at once, each a part of the experts that is measured at the start)",
        low=1,
        high=1 << 20,
    )
    seed: int | None = option(
        None, "Server", "makes the seeds of requests that set none reproducible", low=0, high=(1 << 63) - 1
    )
    log_level: str = option(
        "info",
        "Server",
        "how much to log: a line a request at info, its way through the processes at debug",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = option(
        "text", "Server", "lines to read, or a JSON object a line", choices=("text", "json")
    )
    otlp_endpoint: str | None = option(
        None,
        "Server",
        "send OpenTelemetry traces of requests to this OTLP/HTTP collector, such as http://localhost:4318 (default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT, else none); needs moeserve[otel]",
        metavar="URL",
    )
    debug_dump: str | None = option(
        None,
        "Server",
        "write what the first steps compute in every layer to this new folder, to be compared by `moeserve "
        "compare-dumps` (the prompts can be read out of it)",
        metavar="PATH",
    )
    debug_dump_steps: int | None = option(
        None, "Server", "how many steps --debug-dump writes, which are slow (default: 8)", low=1, high=10000
    )
    record_routing_trace: str | None = option(
        None,
        "Server",
        "write which experts the tokens of answers are routed to in every layer to this new file, one request after "
        "another, whose steps are slow meanwhile; `moeserve bench engine --routing-trace` replays it, `moeserve plan "
        "--routing-trace` predicts the expert cache by it",
        metavar="PATH",
    )
    record_routing_tokens: int | None = option(
        None,
        "Server",
        "how many tokens --record-routing-trace writes (default: 4096)",
        low=1,
        high=1 << 20,
    )
    on_engine_loss: str = option(
        "continue",
        "Server",
        "what becomes of the answers under way when the engine crashes and is started again: continue: they go on from "
        "their tokens; fail: they end with an error",
        choices=("continue", "fail"),
    )
    request_timeout: float | None = option(
        None,
        "Server",
        "seconds from a request's arrival after which it ends with an error (504), in the queue or in its answer "
        "(default: none)",
        low=0.1,
        high=86400,
    )
    step_timeout: float | None = option(
        None,
        "Server",
        "seconds without an answer after which the engine counts as hung and is started again (default: 30 and twenty "
        "times what the step was expected to take)",
        low=0.1,
        high=86400,
    )
    max_engine_crashes: int = option(
        3, "Server", "crashes of the server's processes within a minute that end it", low=1, high=1000
    )
    max_process_memory: float | None = option(
        None,
        "Server",
        "most memory that httpserver, the router and the detokenizer each take beyond what they have when they are "
        "ready, so that a request that needs more ends, and not the machine's memory (default: no bound)",
        low=0.05,
        high=1e6,
        metavar="GIB",
    )
    drain_delay: float = option(
        0.0,
        "Server",
        "seconds after SIGTERM in which /health/ready already says no and requests are still taken, so that a load "
        "balancer notices first",
        low=0,
        high=3600,
    )
    shutdown_timeout: float = option(
        30.0, "Server", "seconds that running requests are given to finish after SIGTERM", low=0, high=86400
    )
