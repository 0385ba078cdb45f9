"""The server's load in the format of SGLang's /v1/loads, by which gateways choose a replica."""

from __future__ import annotations

from datetime import UTC, datetime

from moeserve import __version__
from moeserve.httpserver.generation.service import Service
from moeserve.httpserver.native.objects import Load, Loads


def loads_of(service: Service) -> Loads:
    """Returns the load from the router's newest report; zeros before the first one."""
    report = service.metrics.reported.load
    usage = report.kv_slots_used / report.kv_slots_total if report.kv_slots_total else 0.0
    busy = report.num_running / service.config.max_num_seqs
    load: Load = {
        "dp_rank": 0,
        "num_running_reqs": report.num_running,
        "num_waiting_reqs": report.num_waiting,
        "num_total_reqs": report.num_running + report.num_waiting,
        "num_waiting_tokens": report.queued_tokens,
        "num_used_tokens": report.kv_slots_used,
        "max_total_num_tokens": report.kv_slots_total,
        "max_running_requests": service.config.max_num_seqs,
        "token_usage": round(usage, 4),
        "utilization": round(busy, 4),
        "cache_hit_rate": round(report.cached_tokens / max(report.prompt_tokens, 1), 4),
    }
    found: Loads = {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": __version__,
        "dp_rank_count": 1,
        "loads": [load],
        "aggregate": {
            "total_running_reqs": report.num_running,
            "total_waiting_reqs": report.num_waiting,
            "total_reqs": report.num_running + report.num_waiting,
            "avg_token_usage": load["token_usage"],
            "avg_utilization": load["utilization"],
        },
    }
    if service.engine.state.ready is not None:
        found["engine"] = service.engine.state.ready.device
    return found
