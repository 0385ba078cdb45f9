"""What the packages within httpserver may import of ours, besides themselves."""

from __future__ import annotations

# A child process's own frame: allowed to every process's package, unlike another process's package.
FRAME = {
    "moeserve",
    "moeserve.config",
    "moeserve.errors",
    "moeserve.messages",
    "moeserve.processes",
    "moeserve.sampling",
}

# Within httpserver, imports run from an API's folder to what the APIs share, and from there to HTTP itself. No API
# knows another, nor the table that lists them.
HTTP_APIS = ("openai", "responses", "anthropic", "batches", "lightllm", "llama_server", "mcp")
# What an API of chats and completions may import.
API: set[str] = {
    "moeserve.httpserver.generation",
    "moeserve.httpserver.transport",
    "moeserve.config",
    "moeserve.errors",
    "moeserve.messages",
    "moeserve.sampling",
    "moeserve.chatformat",
    "moeserve.grammar.spec",
    "moeserve.models.facts",
    "moeserve",
}

HTTPSERVER: dict[str, set[str]] = {
    "moeserve.httpserver.transport": {
        "moeserve.config",
        "moeserve.errors",
        "moeserve.messages.refusal",  # which an error carries, here and from the router
        "moeserve.processes.listeners",
        "moeserve.processes.logs",
    },
    "moeserve.httpserver.observability": {
        "moeserve.httpserver.transport",
        "moeserve",
        "moeserve.messages",
        "moeserve.processes.tracing",
    },
    "moeserve.httpserver.documents": {"moeserve.processes.sandbox"},
    "moeserve.httpserver.generation": FRAME
    | {
        "moeserve.httpserver.documents",
        "moeserve.httpserver.transport",
        "moeserve.httpserver.observability",
        "moeserve.models.facts",
        "moeserve.tokenizer",
        "moeserve.grammar",
        "moeserve.chatformat",
    },
    "moeserve.httpserver.web": {"moeserve.httpserver.transport"},
    **{f"moeserve.httpserver.{api}": API for api in HTTP_APIS},
    "moeserve.httpserver.ollama": API
    | {"moeserve.processes.lifecycle"},  # a download is a process of its own
    "moeserve.httpserver.native": {
        "moeserve.models.adapters.modules",
        "moeserve.httpserver.generation",
        "moeserve.httpserver.transport",
        "moeserve.messages",
        "moeserve.placement.heat",
        "moeserve",
    },
}
