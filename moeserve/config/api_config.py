"""The options of the network and of chats."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config.option import option
from moeserve.config.several_models import SeveralModelsConfig


@dataclass(frozen=True, slots=True)
class ApiConfig(SeveralModelsConfig):
    """The options of the network, and of how the API reads and writes chats."""

    host: str = option(
        "127.0.0.1",
        "Network",
        "address to listen on. 127.0.0.1 accepts only programs on this machine; 0.0.0.0 other machines too, "
        "over IPv4 (then set --api-key); :: also over IPv6",
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "Network",
        "a further name to accept in the Host header, for clients that reach the server by it, as through a "
        "proxy; requests with another name are refused, which protects against DNS rebinding. The header is checked "
        "only if --host is a loopback address and there is no API key. IP addresses, the machine's name, names "
        "without a dot, and .localhost, .local and .internal are always accepted. Repeat the flag for more (default: "
        "none)",
        metavar="NAME",
    )
    allowed_origin: tuple[str, ...] = option(
        (),
        "Network",
        "allow web pages of this origin to use the API from a browser (CORS), such as "
        "https://chat.example.com; *: all origins. Repeat the flag for more (default: none; only the "
        "server's own pages)",
        metavar="ORIGIN",
    )
    port: int = option(
        8000, "Network", "TCP port of the API; 0: a free port, which is logged", low=0, high=65535
    )
    uds: str | None = option(
        None,
        "Network",
        "listen on this Unix socket instead of an address and port (default: none)",
        metavar="PATH",
    )
    health_port: int | None = option(
        None,
        "Network",
        "serve /health, /health/ready, /health/live and /metrics on this TCP port of --host too, without TLS or keys "
        "and independent of the API's connection limit; 0: a free port, which is logged (default: none)",
        low=0,
        high=65535,
    )
    ssl_certfile: str | None = option(
        None,
        "Network",
        "serve HTTPS with this certificate (PEM) and its chain; its private key is in the same file or in "
        "--ssl-keyfile (default: none; HTTP)",
        metavar="PATH",
    )
    ssl_keyfile: str | None = option(
        None, "Network", "private key of --ssl-certfile (default: in that file)", metavar="PATH"
    )
    kv_events_endpoint: str | None = option(
        None,
        "Network",
        "publish changes of the prefix cache to gateways, in vLLM's KV event format, on this ZMQ PUB "
        "socket, such as tcp://127.0.0.1:5557 or ipc:///path, so that a gateway can send a request to the "
        "server that has its prefix. Every subscriber can read all prompts and answers (default: none)",
        metavar="ENDPOINT",
    )
    kv_events_replay_endpoint: str | None = option(
        None,
        "Network",
        "ZMQ ROUTER socket on which gateways can ask for KV events that they have missed; needs "
        "--kv-events-endpoint (default: none; missed events are lost)",
        metavar="ENDPOINT",
    )
    kv_events_topic: str = option(
        "",
        "Network",
        "topic of the KV events; some gateways identify servers by it (default: the empty topic)",
        metavar="TOPIC",
    )
    kv_events_format: str = option(
        "maps",
        "Network",
        "how KV events are encoded. maps: as vLLM does since 2026; arrays: as vLLM did before, for older gateways",
        choices=("maps", "arrays"),
    )
    kv_events_block_size: int = option(
        64,
        "Network",
        "number of tokens per block in KV events and in the metric vllm:cache_config_info; use the number "
        "that the gateway is set to",
        low=1,
        high=65536,
    )
    api_key: tuple[str, ...] = option(
        (),
        "Network",
        "require this bearer token on every request except /health, /metrics and the web pages. Repeat the "
        "flag (in the variable: separate by commas) for more keys; each key gets an equal share of a busy "
        "server (default: none; no key is needed)",
        metavar="KEY",
    )
    api_key_file: str | None = option(
        None,
        "Network",
        "file of API keys, in addition to --api-key, one per line: a name and a key. SIGHUP reads it "
        "again. Each key gets an equal share of a busy server (default: none)",
        metavar="PATH",
    )
    max_requests_per_key: int | None = option(
        None,
        "Network",
        "maximum number of open requests per API key; further ones get a 503. The server accepts "
        "--max-num-seqs + --max-num-queued-reqs + 256 connections in all; lower this number to keep one key "
        "from taking most of them (default: --max-num-seqs + --max-num-queued-reqs)",
        low=1,
        high=1 << 20,
    )
    max_idle_connections_per_address: int | None = option(
        None,
        "Network",
        "maximum number of idle connections per client address (IPv6: per /64 network); if there are more, "
        "the one that has been idle for longest is closed. Lower it if single clients hold connections that "
        "others need (default: --max-num-seqs + --max-num-queued-reqs + 128; the server accepts 128 more in all)",
        low=1,
        high=1 << 20,
    )
    chat_template: str | None = option(
        None,
        "Chat",
        "file with a chat template (Jinja) that replaces the model's own, such as one with a mistake "
        "mended (default: the model's)",
        metavar="PATH",
    )
    generation_config: str = option(
        "none",
        "Chat",
        "default sampling parameters. none: those of each API's specification; auto: those that the model "
        "recommends, in generation_config.json or in the GGUF file. Choose auto if answers repeat "
        "themselves or wander. A request's own parameters come first",
        choices=("none", "auto"),
    )
    override_generation_config: str | None = option(
        None,
        "Chat",
        'default sampling parameters that override the model\'s recommendations: {"temperature": 0.7, '
        '"top_p": 0.8}; also {"max_new_tokens": 4096}, for chats without a limit of their own. A '
        "request's own parameters come first (default: none)",
        metavar="JSON",
    )
    tool_call_parser: str = option(
        "auto",
        "Chat",
        "format of the model's tool calls, by which the server separates them from the text; auto: recognised from the "
        "chat template; none: calls stay text. Name one if auto recognises none or the wrong one, which "
        "the log shows",
        choices=(
            "auto",
            "hermes",
            "qwen3_coder",
            "glm45",
            "minimax_m2",
            "minimax_m3",
            "gemma4",
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "deepseek_v4",
            "kimi_k2",
            "mistral",
            "mistral_json",
            "cohere",
            "granite",
            "phi4_mini",
            "seed_oss",
            "hunyuan",
            "nemotron",
            "llama",
            "hy_v3",
            "hy_v3_preview",
            "lfm2",
            "harmony",
            "kimi_k3",
            "solar_open",
            "none",
        ),
    )
    reasoning_parser: str = option(
        "auto",
        "Chat",
        "how the model marks its reasoning (qwen3: <think> and </think>; hunyuan, ernie: the same, with the answer in "
        "<answer> or <response>; hy_v3: <think:opensource>; minimax_m3: <mm:think>; mistral: [THINK] and "
        "[/THINK]; gemma4: <|channel>thought and <channel|>; cohere: <|START_THINKING|>; seed_oss: <seed:think>; "
        "harmony: gpt-oss's channels; kimi_k3: Kimi-K3's sections; solar_open: Solar Open's messages); auto: "
        "recognised from its chat template; none: reasoning stays in the answer. Name one if auto recognises none or "
        "the wrong one, which the log shows",
        choices=(
            "auto",
            "qwen3",
            "hunyuan",
            "ernie",
            "hy_v3",
            "minimax_m3",
            "mistral",
            "gemma4",
            "cohere",
            "seed_oss",
            "harmony",
            "kimi_k3",
            "solar_open",
            "none",
        ),
    )
    control_tokens_in_text: str = option(
        "parse",
        "Chat",
        "control tokens spelled out in messages of users and tools, such as <|im_end|>. parse: they become the "
        "tokens, as in other servers; literal: they stay text, so that no text can end a message or begin another",
        choices=("parse", "literal"),
    )
    unknown_fields: str = option(
        "ignore",
        "Chat",
        "request fields that the server does not know. ignore: drop them; the log names each once, and "
        "the answer's header x-moeserve-ignored-fields names dropped tools and dropped parts of the history, but no "
        "other fields; warn: drop them; the log and the header name up to 16 of them for each request; error: refuse "
        "the request with a 400, which finds misspelt fields",
        choices=("ignore", "warn", "error"),
    )
    mcp_servers: tuple[str, ...] = option(
        (),
        "Chat",
        "let the chat page use the tools of these MCP servers (streamable HTTP): the page asks the user before each "
        "call, and moeserve makes the call. More pairs may follow, or repeat the flag (default: none)",
        metavar="NAME=URL",
        several=True,
    )
    mcp_headers_file: str | None = option(
        None,
        "Chat",
        'headers for the requests to MCP servers, such as {"NAME": {"Authorization": "Bearer TOKEN"}}, in a file that '
        "only the server's user should be able to read. It is read once, at the start (default: none)",
        metavar="PATH",
    )
    data_dir: str | None = option(
        None,
        "Chat",
        "folder for the responses that the Responses API stores, and with several models for the list of the models "
        "that /api/pull has downloaded; both then survive a restart. Each server needs a folder of its own (default: "
        "none, nothing survives)",
        metavar="PATH",
    )
    batch_dir: str | None = option(
        None,
        "Batches",
        "private folder for files and offline batches (/v1/files, /v1/batches, /v1/messages/batches), which then "
        "survive a restart; each server needs a folder of its own (default: none; these paths answer 404)",
        metavar="PATH",
    )
    batch_dir_gib: float = option(
        20.0,
        "Batches",
        "maximum size of the files and results in --batch-dir together; if n API keys store files, each may "
        "use 1 / (n + 1) of it, so that one more key always has room. Uploads beyond it are refused",
        low=0.001,
        high=1e6,
        metavar="GIB",
    )
