"""The options of operation: logs, traces, recordings, deadlines, and what happens after crashes and SIGTERM."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config.engine_config import EngineConfig
from moeserve.config.option import option


@dataclass(frozen=True, slots=True)
class OperationConfig(EngineConfig):
    """The options of operation, as fields of the configuration."""

    seed: int | None = option(
        None,
        "Server",
        "random seed for requests that set no seed of their own, so that the same requests in the same "
        "order get the same samples again (default: random)",
        low=0,
        high=(1 << 63) - 1,
    )
    log_level: str = option(
        "info",
        "Server",
        "least severe messages to log. error: only failures; warning: also what needs attention; info: also one line "
        "per request; debug: also a line from each process that handles the request. Choose warning to omit the line "
        "per request",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = option(
        "text",
        "Server",
        "form of the log on standard error. text: plain lines; json: one JSON object per line, for log "
        "collectors",
        choices=("text", "json"),
    )
    otlp_endpoint: str | None = option(
        None,
        "Server",
        "send OpenTelemetry traces of requests (spans of each process, no texts) to this OTLP/HTTP "
        "collector, such as http://localhost:4318 (default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else "
        "OTEL_EXPORTER_OTLP_ENDPOINT, else none); needs moeserve[otel]",
        metavar="URL",
    )
    debug_dump: str | None = option(
        None,
        "Server",
        "write the results of each layer in the first steps (--debug-dump-steps) to this new folder, for "
        "`moeserve compare-dumps`, which finds where two runs begin to differ. Prompts can be reconstructed "
        "from the folder: keep it private (default: none)",
        metavar="PATH",
    )
    debug_dump_steps: int | None = option(
        None,
        "Server",
        "number of steps that --debug-dump writes; these steps are slow (default: 8)",
        low=1,
        high=10000,
    )
    record_routing_trace: str | None = option(
        None,
        "Server",
        "record to this new file which experts every layer chooses for the generated tokens, one request at "
        "a time, until it has --record-routing-tokens of them; steps are slower meanwhile. `moeserve bench "
        "engine --routing-trace` replays the file, `moeserve plan --routing-trace` predicts the expert "
        "cache from it (default: none)",
        metavar="PATH",
    )
    record_routing_tokens: int | None = option(
        None,
        "Server",
        "number of tokens that --record-routing-trace writes; more make the forecast of the expert cache truer "
        "(default: 4096)",
        low=1,
        high=1 << 20,
    )
    on_engine_loss: str = option(
        "continue",
        "Server",
        "what happens to running answers when the engine crashes and restarts. continue: they continue from "
        "their tokens so far; fail: they end with an error, for clients that send failed requests again "
        "themselves",
        choices=("continue", "fail"),
    )
    request_timeout: float | None = option(
        None,
        "Server",
        "maximum seconds for a request, from its arrival to its answer's end; then it ends with a 504 error "
        "(default: none)",
        low=0.1,
        high=86400,
    )
    step_timeout: float | None = option(
        None,
        "Server",
        "restart the engine if a step takes longer than this many seconds, because it has then probably "
        "hung. Raise it if steps can take longer (default: 30 plus 20 times the step's expected time, or "
        "600 until a first step has been measured; with experts on disk additionally 30 plus the time to "
        "read all of them at 20 MB/s)",
        low=0.1,
        high=86400,
    )
    max_engine_crashes: int = option(
        3,
        "Server",
        "stop the server, with exit code 3, after this many crashes of its processes within a minute, or "
        "after one of them could not start this many times in a row. Lower it if a supervisor (systemd, "
        "Kubernetes) restarts the server",
        low=1,
        high=1000,
    )
    max_process_memory: float | None = option(
        None,
        "Server",
        "maximum memory by which each of httpserver, the router and the detokenizer may grow after the server is "
        "ready; a request that needs more fails instead of exhausting the machine (default: no limit)",
        low=0.05,
        high=1e6,
        metavar="GIB",
    )
    drain_delay: float = option(
        0.0,
        "Server",
        "seconds after SIGTERM during which requests are still accepted while /health/ready fails, so that load "
        "balancers stop sending first. Set it longer than the interval of their probes",
        low=0,
        high=3600,
    )
    shutdown_timeout: float = option(
        30.0,
        "Server",
        "seconds that running requests may take to finish after SIGTERM; then they end with an error",
        low=0,
        high=86400,
    )
