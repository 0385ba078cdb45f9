"""A request's usage and timings, computed from its generations' usages."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from moeserve.messages import schema
from moeserve.messages.schema import TextItem, Usage


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class UsageInfo(TypedDict):
    """OpenAI's usage object. A prompt counts once, even with several choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(TypedDict):
    """Times and rates of a request's phases. With several choices, times are the slowest choice's, in milliseconds, and
    token counts are sums over the choices. A rate is the tokens over the time from the first choice's start to the last
    choice's end; null if the phase took no time."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ram_tokens: int  # cached tokens that came from the RAM tier
    disk_tokens: int  # cached tokens that were read from disk
    draft_tokens: int  # drafted (--speculative-config)
    accepted_draft_tokens: int  # accepted draft tokens
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None


class PromptProgress(TypedDict):
    """The progress object of llama-server's API: `processed` of `total` prompt tokens, `cache` of them from the prefix
    cache; `time_ms` is the time since the prefill began."""

    total: int
    cache: int
    processed: int
    time_ms: float


class UsageTally:
    """The usage of one HTTP request: `n` choices for each prompt, prompt by prompt."""

    def __init__(self, prompt_lengths: Sequence[int], n: int) -> None:
        self._prompt_tokens = sum(prompt_lengths)
        self._n = n
        self._completion = [0] * (len(prompt_lengths) * n)
        self._reasoning = [0] * len(self._completion)
        self._finished: dict[int, Usage] = {}

    def take(self, index: int, item: TextItem, reasoning_tokens: int = 0) -> None:
        """Counts an item's tokens. A generation's last item has its final figures, which replace the count.
        reasoning_tokens: the choice's reasoning tokens so far."""
        self._reasoning[index] = reasoning_tokens
        self._completion[index] += len(item.token_ids)
        if item.usage is not None:
            self._completion[index] = item.usage.completion_tokens
            self._finished[index] = item.usage

    @property
    def all_finished(self) -> bool:
        return len(self._finished) == len(self._completion)

    @property
    def _cached_tokens(self) -> int:
        """Returns the sum over prompts of the first choice's cached tokens: a prompt counts once."""
        return sum(usage.cached_tokens for index, usage in self._finished.items() if index % self._n == 0)

    def usage(self) -> UsageInfo:
        """Returns the usage so far. Cached tokens are known at the end."""
        completion_tokens = sum(self._completion)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": sum(self._reasoning)},
        }

    def timings(self) -> Timings:
        """Returns the timings; all generations must have finished."""
        usages = list(self._finished.values())
        prefill_ms = max(usage.prefill_ms for usage in usages)
        decode_ms = max(usage.decode_ms for usage in usages)
        computed = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
        # Each answer's first token comes from its prefill, so it does not count as decoded.
        decoded = sum(max(usage.completion_tokens - 1, 0) for usage in usages)
        # Choices run together and may wait for one another, so a rate uses the time from the first start to the last
        # end.
        prefill_spans = [(u.queue_ms, u.queue_ms + u.prefill_ms) for u in usages]
        decode_spans = [(end, end + u.decode_ms) for (_, end), u in zip(prefill_spans, usages, strict=True)]
        return {
            "queue_ms": round(max(usage.queue_ms for usage in usages), 3),
            "prefill_ms": round(prefill_ms, 3),
            "decode_ms": round(decode_ms, 3),
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": sum(self._completion),
            "cached_tokens": self._cached_tokens,
            "ram_tokens": sum(u.ram_tokens for i, u in self._finished.items() if i % self._n == 0),
            "disk_tokens": sum(u.disk_tokens for i, u in self._finished.items() if i % self._n == 0),
            "draft_tokens": sum(usage.draft_tokens for usage in usages),
            "accepted_draft_tokens": sum(usage.accepted_draft_tokens for usage in usages),
            "prefill_tokens_per_second": _rate(computed, _length(prefill_spans)),
            "decode_tokens_per_second": _rate(decoded, _length(decode_spans)),
        }


def _length(spans: list[tuple[float, float]]) -> float:
    """Returns the time from the first start to the last end of the spans that took time; 0 if none did."""
    lasting = [(start, end) for start, end in spans if end > start]
    return max(end for _, end in lasting) - min(start for start, _ in lasting) if lasting else 0.0


def prompt_progress(of: schema.PrefillProgress) -> PromptProgress:
    """Returns the wire form of a progress message."""
    return {"total": of.total, "cache": of.cached, "processed": of.done, "time_ms": round(of.ms, 3)}


def _rate(tokens: int, milliseconds: float) -> float | None:
    return round(tokens / milliseconds * 1e3, 3) if milliseconds > 0 else None
