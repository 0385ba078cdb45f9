"""The options of the network and of chats."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config.option import option


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """How the API is reached, and how it reads and writes chats."""

    host: str = option(
        "127.0.0.1", "Network", "address to listen on; 0.0.0.0 admits other machines, :: those with IPv6, too"
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "Network",
        "answer under this name too, where --host is a loopback address and there is no API key: else only under "
        "addresses, names without a dot, and .localhost, .local and .internal; give the flag again for more",
        metavar="NAME",
    )
    allowed_origin: tuple[str, ...] = option(
        (),
        "Network",
        "let web pages of this origin use the API from a browser (CORS), such as https://chat.example.com; * lets all; "
        "give the flag again for more",
        metavar="ORIGIN",
    )
    port: int = option(
        8000, "Network", "TCP port of the API; 0 takes a free one and logs it", low=0, high=65535
    )
    uds: str | None = option(
        None, "Network", "listen at this Unix socket instead of an address and a port", metavar="PATH"
    )
    health_port: int | None = option(
        None,
        "Network",
        "answer /health, /health/ready, /health/live and /metrics at this TCP port of --host too: without TLS or keys, "
        "and however many connections the API has; 0 takes a free one and logs it (default: none)",
        low=0,
        high=65535,
    )
    ssl_certfile: str | None = option(
        None,
        "Network",
        "speak HTTPS with this certificate (PEM), and those that vouch for it",
        metavar="PATH",
    )
    ssl_keyfile: str | None = option(
        None, "Network", "the certificate's private key (default: in the same file)", metavar="PATH"
    )
    kv_events_endpoint: str | None = option(
        None,
        "Network",
        "tell gateways here what the prefix cache holds (vLLM's KV events, a ZMQ PUB socket), such as "
        "tcp://127.0.0.1:5557 or ipc:///path; whoever connects can read all prompts and answers",
        metavar="ENDPOINT",
    )
    kv_events_replay_endpoint: str | None = option(
        None,
        "Network",
        "send gateways here the KV events that they have missed (a ZMQ ROUTER socket)",
        metavar="ENDPOINT",
    )
    kv_events_topic: str = option(
        "", "Network", "topic of the KV events, by which some gateways tell servers apart", metavar="TOPIC"
    )
    kv_events_format: str = option(
        "maps",
        "Network",
        "how KV events are written; maps: as vLLM does now; arrays: as it did before, for older gateways",
        choices=("maps", "arrays"),
    )
    kv_events_block_size: int = option(
        64,
        "Network",
        "tokens of a block in KV events and in vllm:cache_config_info; the same for all servers of a gateway",
        low=1,
        high=65536,
    )
    api_key: tuple[str, ...] = option(
        (),
        "Network",
        "require this bearer token on every request but /health, /metrics and the web pages; give the flag again (in "
        "the variable: after a comma) for more keys, which get equal shares of a busy server",
        metavar="KEY",
    )
    api_key_file: str | None = option(
        None, "Network", "file of more API keys: on each line a name and a key", metavar="PATH"
    )
    max_requests_per_key: int | None = option(
        None,
        "Network",
        "open requests of one API key beyond which its next get a 503 (default: as many as may run and wait, "
        "--max-num-seqs + --max-num-queued-reqs, which leaves 256 connections to others)",
        low=1,
        high=1 << 20,
    )
    max_idle_connections_per_address: int | None = option(
        None,
        "Network",
        "connections of one client address (of IPv6, one /64 network) without a request, beyond which the one that has "
        "waited longest is closed (default: --max-num-seqs + --max-num-queued-reqs + 128, which leaves 128 to others)",
        low=1,
        high=1 << 20,
    )
    chat_template: str | None = option(
        None, "Chat", "file with a chat template (Jinja) to use instead of the model's own", metavar="PATH"
    )
    generation_config: str = option(
        "none",
        "Chat",
        "sampling parameters of requests that set none; none: the API's own defaults; auto: those that the model "
        "recommends, in generation_config.json or in the GGUF file",
        choices=("none", "auto"),
    )
    override_generation_config: str | None = option(
        None,
        "Chat",
        'the same by hand, which goes before what the model recommends: {"temperature": 0.7, "top_p": 0.8}; also '
        '{"max_new_tokens": 4096}, for chats that set no bound',
        metavar="JSON",
    )
    tool_call_parser: str = option(
        "auto",
        "Chat",
        "how the model writes tool calls; auto: as its chat template shows",
        choices=(
            "auto",
            "hermes",
            "qwen3_coder",
            "glm45",
            "minimax_m2",
            "gemma4",
            "deepseek_v3",
            "deepseek_v31",
            "kimi_k2",
            "harmony",
            "none",
        ),
    )
    reasoning_parser: str = option(
        "auto",
        "Chat",
        "how the model marks its thoughts (qwen3: <think> and </think>; gemma4: <|channel>thought and <channel|>; "
        "harmony: gpt-oss's channels); auto: as its chat template shows",
        choices=("auto", "qwen3", "gemma4", "harmony", "none"),
    )
    control_tokens_in_text: str = option(
        "parse",
        "Chat",
        "control tokens that are spelled out in messages of users and tools, such as <|im_end|>; parse: they are the "
        "tokens, as in other servers; literal: they stay text, so that no text can end a message or begin another",
        choices=("parse", "literal"),
    )
    unknown_fields: str = option(
        "ignore",
        "Chat",
        "request fields that the server does not know; ignore: drop them, with a line in the log for each name; warn: "
        "drop them, with a line for each request and their names in the header x-moeserve-ignored-fields; error: "
        "refuse the request",
        choices=("ignore", "warn", "error"),
    )
    data_dir: str | None = option(
        None, "Chat", "folder that keeps stored responses over a restart (default: in memory)", metavar="PATH"
    )
