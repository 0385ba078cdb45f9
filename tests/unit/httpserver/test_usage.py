"""Usage and timings of requests with several choices."""

from __future__ import annotations

import pytest

from moeserve.httpserver.generation.usage import UsageTally
from moeserve.messages.schema import TextItem, Usage


def tally_of(*usages: Usage) -> UsageTally:
    tally = UsageTally([usages[0].prompt_tokens], len(usages))
    for index, usage in enumerate(usages):
        tally.take(index, TextItem(index, "", [], finish_reason="length", usage=usage))
    return tally


@pytest.mark.parametrize(
    ("second_waits_ms", "tokens_per_second"),
    [(0.0, 20 / 0.1), (100.0, 20 / 0.21)],  # 100 ms each, at once, or from 10 to 110 and from 120 to 220
)
def test_a_rate_is_over_the_time_of_all_choices(second_waits_ms: float, tokens_per_second: float) -> None:
    first = Usage(7, 11, 0, queue_ms=0.0, prefill_ms=10.0, decode_ms=100.0)
    wait = second_waits_ms + (10.0 if second_waits_ms else 0.0)
    second = Usage(7, 11, 7, queue_ms=wait, prefill_ms=10.0, decode_ms=100.0)
    timings = tally_of(first, second).timings()
    assert timings["decode_tokens_per_second"] == pytest.approx(tokens_per_second, abs=1e-2)
    assert timings["prefill_tokens_per_second"] == pytest.approx(7 / (wait + 10.0) * 1e3, abs=1e-2)
    assert timings["decode_ms"] == 100.0
    assert timings["queue_ms"] == wait


def test_choices_of_one_token_have_no_rate_and_spoil_none() -> None:
    alone, waiting = (Usage(7, 1, 0, queue_ms=ms, prefill_ms=10.0, decode_ms=0.0) for ms in (0.0, 500.0))
    assert tally_of(alone, waiting).timings()["decode_tokens_per_second"] is None
    longer = Usage(7, 11, 0, queue_ms=0.0, prefill_ms=10.0, decode_ms=100.0)
    assert tally_of(longer, waiting).timings()["decode_tokens_per_second"] == pytest.approx(100.0)
