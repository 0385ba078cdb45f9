"""Computes a run's figures from the times of its requests, with the names and definitions of `vllm bench serve`.

For a successful request (a failed one counts in `failed` only):

- TTFT: sent to the first token.
- ITL: between two consecutive pieces of the answer. All gaps of all requests are one population.
- TPOT: (last token - first token) / (output tokens - 1), one value per request with at least two tokens.
- E2EL: sent to the last token.
- throughputs: over the whole run, from the start to the last answer's end.
- goodput: requests per second that met every objective. In addition to vLLM's ttft, tpot and e2el there is itl, which a
  request meets if the 99th percentile of its own gaps does.

Percentiles interpolate linearly between the two nearest values (numpy's default).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.errors import ConfigError

Floats = npt.NDArray[np.float64]

ITL_PERCENTILE = 99.0  # percentile of a request's gaps that the itl objective limits
METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass(slots=True)
class Outcome:
    """The times of one request, in seconds; `sent` is counted from the start of the run."""

    sent: float
    prompt_len: int
    output_len: int = 0
    cached_tokens: int = 0  # prompt tokens from the server's cache, if it reports them
    ttft: float = 0.0
    itls: array[float] = field(default_factory=lambda: array("d"))
    latency: float = 0.0
    error: str = ""  # why the request failed; empty: it succeeded

    @property
    def tpot(self) -> float:
        """Returns the time per output token; 0 for an answer of one token, which so meets every TPOT objective."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def end(self) -> float:
        return self.sent + self.latency


def parse_goodput(texts: Iterable[str]) -> dict[str, float]:
    """Returns the limits that --goodput sets, in seconds by metric, from texts such as `["ttft:200",
    "itl:50,e2el:9000"]` (milliseconds). Raises ConfigError for an unknown metric, or a limit that is no finite
    number."""
    objectives: dict[str, float] = {}
    for pair in (pair for text in texts for pair in text.split(",")):
        name, _, value = pair.partition(":")
        try:
            seconds = float(value) / 1e3
        except ValueError:
            raise ConfigError(f"--goodput: {pair!r} is not NAME:MILLISECONDS") from None
        if name not in METRICS:
            raise ConfigError(f"--goodput: {name!r} is not one of {', '.join(METRICS)}")
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"--goodput: {pair!r}: the limit must be a finite number, 0 or more")
        objectives[name] = seconds
    return objectives


def is_good(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    """Returns whether a successful request met all objectives, each of which is an inclusive upper limit."""
    for name, most in objectives.items():
        if name == "itl":
            got = float(np.percentile(outcome.itls, ITL_PERCENTILE)) if outcome.itls else 0.0
        elif name == "e2el":
            got = outcome.latency
        else:
            got = float(getattr(outcome, name))
        if got > most:
            return False
    return True


def summarize(
    outcomes: Sequence[Outcome],
    duration: float,
    percentiles: Sequence[float],
    objectives: Mapping[str, float],
) -> dict[str, Any]:
    """Returns the figures under vLLM's names. `duration`: of the run, in seconds; `percentiles`: in percent."""
    done = [outcome for outcome in outcomes if not outcome.error]
    input_tokens = sum(outcome.prompt_len for outcome in done)
    output_tokens = sum(outcome.output_len for outcome in done)
    good = sum(is_good(outcome, objectives) for outcome in done)
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": input_tokens,
        "total_cached_tokens": sum(outcome.cached_tokens for outcome in done),
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration,
        "request_goodput": good / duration if objectives else None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
        "max_output_tokens_per_s": float(max(tokens_per_second(done), default=0)),
        "max_concurrent_requests": int(max(concurrency(done)[1], default=0)),
    }
    for name, values in populations(done).items():
        summary |= _statistics(name, values * 1e3, percentiles)
    return summary


def populations(done: Sequence[Outcome]) -> dict[str, Floats]:
    """Returns for each of METRICS the seconds that its statistics are computed from: float64 [n]."""
    return {
        "ttft": np.array([outcome.ttft for outcome in done]),
        "tpot": np.array([outcome.tpot for outcome in done if outcome.output_len > 1]),
        "itl": np.concatenate(
            [np.empty(0), *(np.frombuffer(outcome.itls) for outcome in done if outcome.itls)]
        ),
        "e2el": np.array([outcome.latency for outcome in done]),
    }


def _statistics(name: str, ms: Floats, percentiles: Sequence[float]) -> dict[str, float]:
    values = ms if ms.size else np.zeros(1)  # 0 if nothing was measured, as in vLLM
    found = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    return found | {f"p{p:g}_{name}_ms": float(np.percentile(values, p)) for p in percentiles}


def tokens_per_second(done: Sequence[Outcome]) -> npt.NDArray[np.int64]:
    """Returns the number of tokens that arrived in each second of the run: int64 [seconds]. A piece of an answer counts
    as one token."""
    if not done:
        return np.zeros(0, np.int64)
    times = [o.sent + o.ttft + np.concatenate([[0.0], np.cumsum(o.itls)]) for o in done]
    return np.bincount(np.concatenate(times).astype(np.int64))


def concurrency(done: Sequence[Outcome]) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Returns the number of requests in progress over time, as (times, counts): counts[i] requests from times[i] on. A
    request that ends at the moment at which another begins is not counted together with it."""
    changes = sorted([(o.sent, 1) for o in done] + [(o.end, -1) for o in done])
    times = np.array([time for time, _ in changes])
    return times, np.cumsum([change for _, change in changes], dtype=np.int64)
