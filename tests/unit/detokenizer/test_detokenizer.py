"""Tokens to text: characters never split, ids and logprobs never lost, one final item, the stop protocol."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from moeserve.detokenizer.incremental import TokenDecoder
from moeserve.detokenizer.manager import Detokenizer, serve
from moeserve.messages import codec
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.reasoning import Thinking
from moeserve.messages.sampling import TextOptions, TokenLogprob
from moeserve.messages.schema import (
    DetokenizeEnd,
    DetokenizeStart,
    Heartbeat,
    PrefillProgress,
    RequestError,
    RouterStarted,
    Shutdown,
    StopHit,
    TextItem,
    TextOut,
    TokensItem,
    TokensOut,
    Usage,
)

SPECIAL = 256
TOKEN_BYTES = [bytes([i]) for i in range(256)] + [b"<|end|>"]  # every byte is a token
USAGE = Usage(4, 99, 2, 1.0, 2.0, 3.0)

# Pieces that make broken UTF-8 likely: beginnings, continuations, over-long forms, surrogates.
HARD_BYTES = st.sampled_from(
    [b"a", "é".encode(), "語".encode(), "🙂".encode(), b"\xe0", b"\x80", b"\xf4", b"\xed"]
)
ROUGH_TEXT = st.lists(st.one_of(HARD_BYTES, st.binary(max_size=3)), max_size=20).map(b"".join)


@given(ROUGH_TEXT, st.lists(st.integers(0, 60), max_size=20))
def test_any_cut_of_any_bytes_decodes_as_the_whole(data: bytes, borders: list[int]) -> None:
    edges = [0, *sorted(border % (len(data) + 1) for border in borders), len(data)]
    tokens = [data[a:b] for a, b in pairwise(edges)]
    decoder = TokenDecoder(tokens, skipped=())
    pieces = [decoder.push(i) for i in range(len(tokens))]
    assert "".join(pieces) + decoder.flush() == data.decode("utf-8", "replace")


def test_a_character_waits_for_its_last_byte() -> None:
    decoder = TokenDecoder(TOKEN_BYTES, skipped=())
    assert [decoder.push(byte) for byte in "🙂".encode()] == ["", "", "", "🙂"]


def test_special_tokens_are_skipped_and_characters_join_across_them() -> None:
    first, *rest = "é".encode()
    skipping, showing = TokenDecoder(TOKEN_BYTES, {SPECIAL}), TokenDecoder(TOKEN_BYTES, ())
    tokens = [first, SPECIAL, *rest]
    assert "".join(map(skipping.push, tokens)) == "é"
    assert "".join(map(showing.push, [*b"a", SPECIAL])) == "a<|end|>"


def logprob(token_id: int, position: int) -> TokenLogprob:
    return TokenLogprob(token_id, -float(position), 1, (token_id,), (-float(position),))


def item(tokens: bytes | list[int], request: int = 1, **fields: object) -> TokensItem:
    return TokensItem(request, list(tokens), **fields)  # type: ignore[arg-type]


def opened(**options: object) -> Detokenizer:
    detokenizer = Detokenizer(TOKEN_BYTES, frozenset({SPECIAL}))
    detokenizer.open(DetokenizeStart(1, TextOptions(**options)))  # type: ignore[arg-type]
    return detokenizer


def test_control_tokens_that_a_format_reads_are_part_of_the_text() -> None:
    tokens = [*b"a", SPECIAL, *b"b"]
    for options, text in (({}, "ab"), ({"shown_tokens": (SPECIAL,)}, "a<|end|>b")):
        (out,), _ = opened(**options).tokens(TokensOut([item(tokens)]))
        assert out.text == text


def test_a_stop_string_counts_only_after_min_tokens() -> None:
    detokenizer = opened(stop=("b",), min_tokens=4)
    (out,), hits = detokenizer.tokens(TokensOut([item(b"ab")]))
    assert (out.text, hits) == ("ab", [])
    (out,), hits = detokenizer.tokens(TokensOut([item(b"b")]))  # the third token
    assert (out.text, hits) == ("b", [])
    items, hits = detokenizer.tokens(TokensOut([item(b"bx")]))  # the fourth, and what came after it
    assert (items, hits) == ([], [StopHit(id=1, num_tokens=4)])
    (out,), _ = detokenizer.tokens(TokensOut([item(b"", finish_reason="length", usage=USAGE)]))
    assert (out.text, out.finish_reason, out.stop_reason) == ("", "stop", "b")
    assert out.usage is not None
    assert out.usage.completion_tokens == 4


OPEN, CLOSE, CALL = b"[", b"]", b"{"
REASONING = Thinking(OPEN[0], CLOSE[0], (), is_open=False)


@pytest.mark.parametrize(
    ("reasoning", "written", "text"),
    [
        (REASONING, b"[a!b]c!d", "[a!b]c"),  # sgl-project/sglang#40529, vllm-project/vllm#38499
        (msgspec.structs.replace(REASONING, is_open=True), b"a!b]c!d", "a!b]c"),
        (REASONING, b" \n[a!b]c!d", " \n[a!b]c"),
        (REASONING, b"a!b]c!d", "a"),  # an answer without reasoning
        (REASONING, b"!", ""),
        (None, b"[a!b]c!d", "[a"),
        (REASONING, b"[a]\n\n\nb\n\nc", "[a]\n\n\nb"),  # the template's own line ends
        (REASONING, b"[a]b[c!d", "[a]b[c"),  # no further part
        (msgspec.structs.replace(REASONING, call_token=CALL[0]), b"[a!{b!c", "[a!{b"),  # a call ends the part
        (
            msgspec.structs.replace(REASONING, call_token=CALL[0], call_lead=b"<"[0]),
            b"[a!{b!<{c!d",
            "[a!{b!<{c",
        ),
    ],
)
def test_a_stop_string_ends_the_answer_not_the_reasoning(
    reasoning: Thinking | None, written: bytes, text: str
) -> None:
    for size in (1, len(written)):
        detokenizer = opened(stop=("!", "\n\n"), reasoning=reasoning)
        pieces = [written[at : at + size] for at in range(0, len(written), size)]
        items, hits = zip(*(detokenizer.tokens(TokensOut([item(piece)])) for piece in pieces), strict=True)
        (last,), _ = detokenizer.tokens(TokensOut([item(b"", finish_reason="length", usage=USAGE)]))
        assert "".join(one.text for some in items for one in some) + last.text == text
        assert any(hits)


def test_the_closing_tag_may_be_a_stop_string() -> None:
    detokenizer = opened(stop=("]",), reasoning=REASONING)
    _, hits = detokenizer.tokens(TokensOut([item(b"[a]b")]))
    assert hits == [StopHit(id=1, num_tokens=3)]


def test_no_stop_string_begins_in_the_reasoning_and_ends_in_the_answer() -> None:
    for stops, shown in ((("a]b",), "[a]bc"), (("]b",), "[a"), (("a]", "bc"), "[a]")):
        detokenizer = opened(stop=stops, reasoning=REASONING)
        parts = [b"[a]bc"[at : at + 1] for at in range(5)]
        items = [one for part in parts for one in detokenizer.tokens(TokensOut([item(part)]))[0]]
        items += detokenizer.tokens(TokensOut([item(b"", finish_reason="length", usage=USAGE)]))[0]
        assert "".join(one.text for one in items) == shown


@given(
    st.text(alphabet="ab🙂é", max_size=30).map(str.encode),
    st.lists(st.text(alphabet="ab🙂é", min_size=1, max_size=4), max_size=3).map(tuple),
    st.lists(st.integers(0, 200), max_size=10),
    st.booleans(),
)
def test_ids_and_logprobs_are_delivered_once_up_to_the_stop(
    data: bytes, stops: tuple[str, ...], borders: list[int], include_stop: bool
) -> None:
    """One token a byte, in any steps: what arrives is what a look at the whole text says."""
    tokens = list(data)
    edges = [0, *sorted(border % (len(tokens) + 1) for border in borders), len(tokens)]
    detokenizer = opened(stop=stops, include_stop=include_stop)
    items: list[TextItem] = []
    hits: list[StopHit] = []
    for a, b in pairwise(edges):
        probs = [logprob(tokens[i], i) for i in range(a, b)]
        out, hit = detokenizer.tokens(TokensOut([item(tokens[a:b], logprobs=probs)]))
        items, hits = items + out, hits + hit
    out, hit = detokenizer.tokens(TokensOut([item([], finish_reason="length", usage=USAGE)]))
    items, hits = items + out, hits + hit

    text = data.decode()
    ends = [(end, stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    final = items[-1]
    assert [i.finish_reason for i in items[:-1]] == [None] * (len(items) - 1)
    assert final.usage is not None
    if ends:
        end, stop = min(ends, key=lambda pair: (pair[0], -len(pair[1])))
        count = len(text[:end].encode())
        assert (final.finish_reason, final.stop_reason, hits) == ("stop", stop, [StopHit(1, count)])
        assert final.usage.completion_tokens == count
        expected = text[:end] if include_stop else text[: end - len(stop)]
    else:
        count, expected = len(tokens), text
        assert (final.finish_reason, final.stop_reason, hits) == ("length", None, [])
        assert final.usage == USAGE
    assert "".join(i.text for i in items) == expected
    assert [t for i in items for t in i.token_ids] == tokens[:count]
    assert [p for i in items for p in i.logprobs or []] == [logprob(tokens[i], i) for i in range(count)]
    assert detokenizer.num_open == 0


@given(
    st.text(alphabet="ab🙂é", max_size=30).map(str.encode),
    st.lists(st.text(alphabet="ab🙂é", min_size=1, max_size=4), max_size=3).map(tuple),
    st.integers(0, 200),
)
def test_another_detokenizer_goes_on_from_the_tokens_that_a_client_has(
    data: bytes, stops: tuple[str, ...], border: int
) -> None:
    whole, first = opened(stop=stops), opened(stop=stops)
    expected = [out for token in data for out in whole.tokens(TokensOut([item([token])]))[0]]
    sent = [
        out
        for token in data[: border % (len(data) + 1)]
        for out in first.tokens(TokensOut([item([token])]))[0]
    ]
    had = [token for out in sent for token in out.token_ids]
    second = Detokenizer(TOKEN_BYTES, frozenset({SPECIAL}))
    second.open(DetokenizeStart(1, TextOptions(stop=stops), output=array("i", had).tobytes()))
    sent += [out for token in data[len(had) :] for out in second.tokens(TokensOut([item([token])]))[0]]
    assert sent == expected
    end = TokensOut([item([], finish_reason="length", usage=USAGE)])
    assert second.tokens(end) == whole.tokens(end)


def test_held_text_still_delivers_its_ids_at_once() -> None:
    items, _ = opened(stop=("abc",)).tokens(TokensOut([item(b"ab")]))
    assert items == [TextItem(1, "", list(b"ab"))]


def test_stop_waits_for_the_routers_usage_and_drops_later_tokens() -> None:
    detokenizer = opened(stop=("!",))
    assert detokenizer.tokens(TokensOut([item(b"hi!x")])) == ([], [StopHit(1, 3)])
    assert detokenizer.tokens(TokensOut([item(b"yz")])) == ([], [])
    (final,), hits = detokenizer.tokens(TokensOut([item(b"", finish_reason="length", usage=USAGE)]))
    assert (final.text, final.token_ids, hits) == ("hi", list(b"hi!"), [])
    assert (final.finish_reason, final.stop_reason) == ("stop", "!")
    assert final.usage == Usage(4, 3, 2, 1.0, 2.0, 3.0)


def test_stop_in_the_routers_last_item_wins_without_a_message_to_the_router() -> None:
    (final,), hits = opened(stop=("!",)).tokens(
        TokensOut([item(b"hi!x", finish_reason="length", usage=USAGE)])
    )
    assert hits == []
    assert (final.text, final.finish_reason, final.stop_reason) == ("hi", "stop", "!")
    assert final.usage is not None
    assert final.usage.completion_tokens == 3


def test_stop_token_is_named_as_the_reason_and_held_text_comes_out() -> None:
    (final,), _ = opened(stop=("end.",)).tokens(
        TokensOut([item(b"the en", finish_reason="stop", stop_token=SPECIAL, usage=USAGE)])
    )
    assert (final.text, final.finish_reason, final.stop_reason) == ("the en", "stop", SPECIAL)


def test_unfinished_character_at_the_end_becomes_a_replacement() -> None:
    (final,), _ = opened().tokens(TokensOut([item(b"a\xf0\x9f", finish_reason="length", usage=USAGE)]))
    assert final.text == "a�"


def test_prompt_logprobs_pass_through_without_tokens() -> None:
    probs = [logprob(5, 1)]
    assert opened().tokens(TokensOut([item(b"", prompt_logprobs=probs)]))[0][0].prompt_logprobs == probs


def test_progress_passes_through_without_tokens() -> None:
    progress = PrefillProgress(total=9, cached=2, done=4, ms=1.5)
    assert opened().tokens(TokensOut([item(b"", progress=progress)]))[0][0].progress == progress


def test_requests_do_not_share_half_characters() -> None:
    detokenizer = opened()
    detokenizer.open(DetokenizeStart(2, TextOptions()))
    first, second = "é".encode(), "🙂".encode()
    texts = ""
    for a, b in ((first[:1], second[:2]), (first[1:], second[2:])):
        items, _ = detokenizer.tokens(TokensOut([item(a, 1), item(b, 2)]))
        texts += "".join(f"{i.id}{i.text} " for i in items)
    assert texts == "1 2 1é 2🙂 "


# ---------------------------------------------------------------- the loop, over real sockets


@pytest.fixture
def wires(tmp_path: Path) -> Iterator[tuple[PushChannel, PullChannel[object], PullChannel[object]]]:
    """A detokenizer's loop in a thread; the router's end in, the router's and httpserver's ends out."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = {name: f"ipc://{tmp_path / name}" for name in ("router", "detokenizer", "http")}
    router = PullChannel[object](context, address["router"], codec.TO_ROUTER)  # type: ignore[arg-type]
    http = PullChannel[object](context, address["http"], codec.TO_HTTP)  # type: ignore[arg-type]

    def run() -> None:
        inbox = PullChannel(context, address["detokenizer"], codec.TO_DETOKENIZER)
        to_router, to_http = PushChannel(context, address["router"]), PushChannel(context, address["http"])
        serve(Detokenizer(TOKEN_BYTES, frozenset({SPECIAL})), inbox, to_router, to_http)

    thread = threading.Thread(target=run)
    thread.start()
    push = PushChannel(context, address["detokenizer"])
    yield push, router, http
    push.send(Shutdown())
    thread.join(30)
    assert not thread.is_alive(), "the loop did not end on Shutdown"
    context.destroy(linger=0)


def heard(http: PullChannel[Any]) -> object:
    """The next message but the heartbeats."""
    while isinstance(message := http.recv(timeout=30), Heartbeat):
        pass
    return message


def test_loop_says_that_it_lives_though_nothing_happens(
    wires: tuple[PushChannel, PullChannel[object], PullChannel[object]],
) -> None:
    _, _, http = wires
    assert [http.recv(timeout=30) for _ in "ab"] == 2 * [Heartbeat("detokenizer")]


def test_loop_sends_text_to_http_stop_hits_to_the_router_and_passes_errors_on(
    wires: tuple[PushChannel, PullChannel[object], PullChannel[object]],
) -> None:
    push, router, http = wires
    push.send(DetokenizeStart(1, TextOptions(stop=("!",))))
    push.send(DetokenizeStart(2, TextOptions()))
    push.send(TokensOut([item(b"a!", 1), item(b"b", 2)]))
    assert router.recv(timeout=30) == StopHit(1, 2)
    assert heard(http) == TextOut([TextItem(2, "b", list(b"b"))])
    push.send(RequestError(2, 500, "the engine died"))
    assert heard(http) == RequestError(2, 500, "the engine died")
    push.send(RequestError(3, 503, "the queue is full"))  # refused before DetokenizeStart
    assert heard(http) == RequestError(3, 503, "the queue is full")
    push.send(DetokenizeEnd(1))
    push.send(DetokenizeStart(4, TextOptions()))
    push.send(TokensOut([item(b"c", 4)]))
    assert heard(http) == TextOut([TextItem(4, "c", list(b"c"))]), "a closed request sends nothing"


# ---------------------------------------------------------------- the process itself


def test_a_new_router_has_the_requests_of_the_lost_one_forgotten(
    wires: tuple[PushChannel, PullChannel[object], PullChannel[object]],
) -> None:
    push, _, http = wires
    push.send(DetokenizeStart(1, TextOptions()))
    push.send(RouterStarted())
    push.send(DetokenizeStart(2, TextOptions(), output=array("i", list(b"ab")).tobytes()))
    push.send(TokensOut([item(b"a", 1), item(b"c", 2)]))
    assert heard(http) == TextOut([TextItem(2, "c", list(b"c"))])
