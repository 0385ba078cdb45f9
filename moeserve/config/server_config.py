"""ServerConfig: every option of the server."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config.operation_config import OperationConfig
from moeserve.config.option import option


@dataclass(frozen=True, slots=True)
class ServerConfig(OperationConfig):
    """The options that the user gave, or their defaults. Paths are absolute; None means "decide from the model and the
    machine"."""

    model: str = option(
        "",
        "Model",
        "a .gguf file, the first file of a split set (-00001-of-0000N.gguf), a folder with such a file, or a folder "
        "with config.json, tokenizer.json and *.safetensors; or a name on the Hugging Face Hub to download: org/repo, "
        "org/repo:Q4_K_M, org/repo:file.gguf, org/repo@revision (default: the small demonstration model that ships "
        "with moeserve)",
        metavar="MODEL",
    )
    served_model_name: str | None = option(
        None,
        "Model",
        "the model's name in the API, and after commas further names for it, by which clients may ask for "
        "it (default: the file's name without .gguf, or the name on the hub)",
        metavar="NAME",
    )
    max_model_len: int | None = option(
        None,
        "Model",
        "maximum tokens of one request, prompt and answer together; longer ones are refused. Lower it if "
        "the KV pool has room for fewer (default: the model's context length, or the size of the KV pool if that "
        "is less)",
        low=16,
        high=1 << 24,
    )
    load_format: str = option(
        "auto",
        "Model",
        "auto: load the file's weights; dummy: random weights with the file's shapes and types, for "
        "benchmarks (a header without tensors is enough; answers have no meaning)",
        choices=("auto", "dummy"),
    )
    mmproj: str | None = option(
        None,
        "Model",
        "the model's vision tower, which lets chats contain pictures: an mmproj GGUF file, a folder of safetensors, or "
        "auto: the only mmproj file beside the model, or the tower in the model's own folder of safetensors. No effect "
        "with several GPUs or --worker (default: none; pictures in users' messages are refused, those in tools' "
        "results and assistants' messages are replaced by a note)",
        metavar="FILE",
    )
    mmproj_device: str = option(
        "auto",
        "Model",
        "where the vision tower computes. cuda: on the first NVIDIA GPU, which is fastest and takes memory "
        "from the KV cache; cpu: on the CPU, in 16-bit integers with AVX-512 VNNI (--isa), else in float32; "
        "auto: on the GPU if the model is there too and the tower takes at most an eighth of the GPU "
        "memory, else on the CPU",
        choices=("auto", "cpu", "cuda"),
    )
    image_min_tokens: int | None = option(
        None,
        "Model",
        "enlarge pictures of fewer than N tokens, so that the model sees more of a small picture's detail; "
        "such pictures then take longer to read (default: 8; MiniMax M3: 4). Gemma 3 and 4, Kimi and Llama 4 refuse "
        "this flag",
        low=1,
        high=16384,
        metavar="N",
    )
    image_max_tokens: int | None = option(
        None,
        "Model",
        "most tokens of a picture: larger pictures are shrunk to it (Gemma 4: smaller ones are also enlarged to it; "
        "Kimi: a few more may result). Fewer are read faster, but show less detail (default: 4096; Gemma 4: "
        "280; MiniMax M3: 576; Llama 4: 17 tiles). No effect on Gemma 3, whose pictures have a fixed size. Gemma 3 "
        "refuses a limit below that size, Llama 4 one below a tile",
        low=4,
        high=16384,
        metavar="N",
    )
    video_max_tokens: int = option(
        4096,
        "Model",
        "at most N tokens for all frames of a video together, and 768 for each pair of frames. If N is small, files "
        "lose frames, and a video that is a list of too many pictures is refused. A larger N shows more detail, but "
        "videos are read more slowly and take room in the KV pool (Qwen recommends 12288). Only Qwen's towers read "
        "videos",
        low=4,
        high=16384,
        metavar="N",
    )
    image_cache: float = option(
        0.5,
        "Model",
        "RAM for embeddings of recent pictures, so that a picture that a conversation sends again with each "
        "turn is not encoded again. Raise it for conversations with many pictures; 0: none",
        low=0,
        high=1e6,
        metavar="GIB",
    )
    image_share: float = option(
        0.1,
        "Model",
        "share of the device's time for encoding pictures while answers are generated: with 0.1, answers run at 0.9 "
        "of their speed. The share grows for a picture that would take over a minute otherwise. 1: encode pictures "
        "at once, while answers wait",
        low=0.01,
        high=1,
        metavar="SHARE",
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "Model",
        "hosts from which the server may fetch pictures that requests name by URL; more may follow, or "
        "repeat the flag (default: none; requests with URLs of pictures are refused)",
        metavar="HOST",
        several=True,
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "Model",
        "serve a LoRA adapter (a PEFT folder or a llama.cpp GGUF file) as a model with this name; more "
        "pairs may follow, or repeat the flag. Not with several GPUs or --worker, or if the CPU computes the first "
        "layers of a GPU's model; on a GPU not for some models (the error says so) (default: none)",
        metavar="NAME=PATH",
        several=True,
    )
    lora_dir: str | None = option(
        None,
        "Model",
        "let clients load and unload LoRA adapters from this folder while the server runs, by POST to "
        "/v1/load_lora_adapter and /v1/unload_lora_adapter. Refused where --lora-modules is (default: none; these "
        "paths answer 403)",
        metavar="PATH",
    )
    max_loras: int | None = option(
        None,
        "Model",
        "maximum number of loaded adapters with --lora-dir, including those of --lora-modules; a further "
        "one is refused until a client unloads one. More take more of --lora-memory (default: 16)",
        low=1,
        high=1024,
    )
    lora_memory: float | None = option(
        None,
        "Model",
        "memory reserved for adapters that --lora-dir loads, on the GPU or in RAM, where the model is; an "
        "adapter that does not fit is refused (default: 1)",
        low=0.001,
        high=1e6,
        metavar="GIB",
    )
    pull: str = option(
        "off",
        "Model",
        "allow: let clients download models from the Hugging Face Hub by POST to /api/pull, as in Ollama, "
        "and remove them by DELETE to /api/delete; off: refuse both",
        choices=("off", "allow"),
    )
    max_num_seqs: int = option(
        64,
        "Capacity",
        "maximum number of requests that are computed together; further ones wait. More raise the "
        "throughput of all together, but make each answer slower; each needs room in the KV pool",
        low=1,
        high=4096,
    )
    max_total_tokens: int | None = option(
        None,
        "Capacity",
        "size of the KV pool: the tokens that all running requests and the prefix cache may hold together. "
        "Lower it to leave memory to other programs; raise it for longer or more requests (default: on the CPU half of "
        "the memory that the weights leave; on a GPU a quarter, or more if the experts leave more; at most "
        "--max-num-seqs x --max-model-len)",
        low=64,
        high=1 << 28,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Capacity",
        "maximum tokens in one step, decode and prefill together. More read prompts faster, but answers wait longer "
        "for a step (default: CPU 512, with experts on disk 2048; GPU 16384, in steps with decode 8192. Halved, but "
        "not below 512, until the step's buffers fit 3% of the GPU memory, or 5% of the RAM for experts if others "
        "are on disk)",
        low=1,
        high=65536,
    )
    max_num_queued_reqs: int = option(
        2048,
        "Capacity",
        "maximum number of waiting requests; further ones get a 503. With API keys, each key may fill 1/(n+1) of it "
        "while n keys have requests, so one key alone half. Lower it to refuse requests rather than let them wait long",
        low=1,
        high=1 << 20,
    )
    max_num_queued_tokens: int = option(
        1 << 20,
        "Capacity",
        "maximum tokens of all waiting prompts together; further requests get a 503. An empty queue accepts a prompt "
        "of any length. Lower it to refuse requests rather than let them wait long",
        low=1,
        high=1 << 30,
    )
    max_itl_ms: float | None = option(
        None,
        "Capacity",
        "target for the time between two tokens of an answer, in milliseconds (99th percentile). While answers are "
        "generated, steps read fewer prompt tokens, so that each step takes at most this long; prompts are then read "
        "more slowly (default: no limit)",
        low=1,
        high=3.6e6,
        metavar="MS",
    )
    prefill_share: float | None = option(
        None,
        "Capacity",
        "share of the time for reading prompts while answers are generated: with 0.4, answers run at 0.6 of their "
        "speed. While more prompts wait than answers run, prompts get more; short prompts always do (0.6 where the "
        "share is 0.4), unless prompts stream experts. Raise it if prompts wait too long. 1: read prompts first, in "
        "the largest steps, for the best throughput; answers wait meanwhile (default: 0.4; 0.5 if prompts stream "
        "experts from RAM to a GPU; 1 if all experts are on a GPU)",
        low=0.01,
        high=1,
        metavar="SHARE",
    )
    prefix_cache: str = option(
        "auto",
        "Capacity",
        "which clients may reuse one another's cached prompts and answers. A cached prompt is answered "
        "sooner, so that a client can infer from the delay that another client has sent it. shared: all clients; "
        "per-key: clients with the same API key; off: no prefix cache; auto: per-key if there are API keys, else "
        "shared",
        choices=("auto", "shared", "per-key", "off"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "Capacity",
        "type of the KV cache. f16 (auto): 16 bits; q8_0: 8 bits with a scale per 32 numbers, for nearly "
        "twice as many tokens at a small loss of accuracy. On a GPU also bf16, and fp8: e4m3 with a scale "
        "per token and head, a little smaller than q8_0 and less accurate. Choose q8_0 if long contexts or "
        "many requests do not fit. Models with MLA, and DeepSeek V4, support only f16; those with heads that are no "
        "multiple of 32 wide, or with keys and values of different widths, only f16 and bf16; those that cap attention "
        "scores, on the CPU only f16. fp8 needs compute capability 8.9",
        choices=("auto", "f16", "bf16", "q8_0", "fp8"),
    )
    kv_ram: float | None = option(
        None,
        "Capacity",
        "RAM that holds a copy of the prefixes in a GPU's KV pool; when a prompt begins with a prefix that the pool "
        "has evicted, it is copied back instead of computed. 0: none (default: a quarter of the RAM that is free "
        "after loading, at most 4 times the KV pool; none if that would be less than the pool, or if sliding-window "
        "layers have a pool of their own). Not on the CPU, with several GPUs, an EAGLE-3 head or --prefix-cache off, "
        "for DeepSeek V4, or if the CPU computes the first layers",
        low=0,
        high=1e6,
        metavar="GIB",
    )
    kv_disk: str | None = option(
        None,
        "Capacity",
        "folder in which the prefix cache keeps KV of prompts and answers on disk, to read it back when a "
        "prompt begins with the same text, also after a restart; --kv-disk-gib limits it. For one server "
        "at a time; not with several GPUs, an EAGLE-3 head or --prefix-cache off, for DeepSeek V4 on a GPU, or if the "
        "CPU computes the first layers of a GPU's model. The texts can be reconstructed from these files (default: "
        "none)",
        metavar="PATH",
    )
    kv_disk_gib: float | None = option(
        None,
        "Capacity",
        "maximum size of --kv-disk; beyond it, what was not used for longest is deleted (default: 10)",
        low=0.001,
        high=1e6,
        metavar="GIB",
    )
    kv_window_ratio: float | None = option(
        None,
        "Capacity",
        "share of the KV memory for a separate pool for sliding-window layers (every other layer of gpt-oss, say), "
        "which need only the last tokens; more requests then fit into the same memory. 0: one pool for all layers "
        "(default: a separate pool with a third of the other pool's tokens, with --prefix-cache off only with those "
        "that running requests need; none (0) if it would not make room for more tokens, or with several GPUs, "
        "--kv-ram, --kv-disk, a GPU's first layers on the CPU or recurrent layers)",
        low=0,
        high=0.9,
        metavar="SHARE",
    )
    state_snapshot_budget: float | None = option(
        None,
        "Capacity",
        "memory, in RAM or on the GPU beside the weights, for snapshots of recurrent state, from which a "
        "recurrent model continues a conversation instead of reading it again; 0: none (default: an eighth "
        "of the memory that weights and the states of running requests leave free, at most 4 x "
        "--max-num-seqs snapshots)",
        low=0,
        high=1e6,
        metavar="GIB",
    )
    device: str = option(
        "auto",
        "Device",
        "cuda: the first NVIDIA GPU; cpu: no GPU; auto: cuda if a usable GPU is present, else cpu",
        choices=("auto", "cpu", "cuda"),
    )
    gpus: str = option(
        "1",
        "Device",
        "divide the model among the first N NVIDIA GPUs, or among the GPUs with the listed numbers, such as "
        "0,2, for a model that is larger than one GPU's memory or for more speed; 1: one GPU",
        metavar="N",
    )
    parallel: str = option(
        "auto",
        "Device",
        "how several GPUs divide the model. tensor: each has a part of the heads and experts of every "
        "layer, so that each answer is faster; layers: each has some of the layers, one GPU after the "
        "other, which needs less traffic between GPUs; auto: tensor, or layers if the model's layers "
        "cannot be divided or the GPUs cannot access one another's memory",
        choices=("auto", "layers", "tensor"),
    )
    worker: str | None = option(
        None,
        "Network",
        "compute on another machine, where `moeserve worker` listens at this address; needs "
        "--worker-ssl-certfile and --worker-ssl-ca-certs. This machine needs --model, too: the same "
        "file, or only its header, without weights (default: none; compute on this machine)",
        metavar="HOST:PORT",
    )
    worker_ssl_certfile: str | None = option(
        None,
        "Network",
        "certificate by which this server identifies itself to the worker (PEM); required with --worker (default: "
        "none)",
        metavar="PATH",
    )
    worker_ssl_keyfile: str | None = option(
        None, "Network", "private key of --worker-ssl-certfile (default: in that file)", metavar="PATH"
    )
    worker_ssl_ca_certs: str | None = option(
        None,
        "Network",
        "CA certificates (PEM) by which the worker's certificate is checked; required with --worker (default: none)",
        metavar="PATH",
    )
