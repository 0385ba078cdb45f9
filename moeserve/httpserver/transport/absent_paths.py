"""Error messages for paths of other servers' APIs that this server lacks: the reason, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_TEXT_ONLY: Final = "moeserve serves text only"
_NO_EMBEDDINGS: Final = "moeserve serves no embedding models"
_NOT_KEPT: Final = "the server keeps only responses; use /v1/responses with previous_response_id"
_ONE_MODEL: Final = "the model is given at the server's start, with --model"

# Keyed by the path's first segments.
_REASONS: Final[Mapping[str, str]] = {
    "/v1/embeddings": _NO_EMBEDDINGS,
    "/embeddings": _NO_EMBEDDINGS,
    "/embedding": _NO_EMBEDDINGS,
    "/api/embed": _NO_EMBEDDINGS,
    "/api/embeddings": _NO_EMBEDDINGS,
    "/v1/rerank": "moeserve serves no such models",
    "/v1/score": "moeserve serves no such models",
    "/v1/moderations": "moeserve serves no such models",
    "/v1/audio": _TEXT_ONLY,
    "/v1/images": _TEXT_ONLY,
    "/v1/videos": _TEXT_ONLY,
    "/v1/realtime": f"{_TEXT_ONLY}, over HTTP",
    "/v1/uploads": "upload the file whole, to /v1/files",
    "/v1/assistants": _NOT_KEPT,
    "/v1/threads": _NOT_KEPT,
    "/v1/conversations": _NOT_KEPT,
    "/v1/chat/completions": _NOT_KEPT,
    "/v1/responses/compact": "no compaction here; send a shorter conversation",
    "/v1/vector_stores": "no tools that run at the server",
    "/v1/containers": "no tools that run at the server",
    "/v1/skills": "no tools that run at the server",
    "/v1/fine_tuning": "moeserve does not train; LoRA adapters are loaded with --lora-modules",
    "/v1/complete": "use /v1/messages",
    "/api/push": _ONE_MODEL,
    "/api/create": _ONE_MODEL,
    "/api/copy": _ONE_MODEL,
}


def why_absent(path: str) -> str:
    """Returns the reason why a path has no route; "" for an unknown path."""
    parts = path.rstrip("/").split("/")
    for end in range(min(len(parts), 5), 1, -1):
        if reason := _REASONS.get("/".join(parts[:end])):
            return reason
    return ""
