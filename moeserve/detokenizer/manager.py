"""The detokenizer: turns each request's tokens into text, and tells the router when a stop string ends a request.

Each TokensItem becomes one TextItem at once, with all its token ids and logprobs. If the text is held back (an
unfinished character, the prefix of a stop string), the item's text is empty. There are two exceptions. Tokens after a
stop string, sampled before the router had the StopHit, are dropped. The item in which the stop string was found waits
for the router's last item, which has the usage.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence, Set
from typing import Final

import msgspec

from moeserve.detokenizer.answer_start import answer_start
from moeserve.detokenizer.detokenize_tracer import DetokenizeTracer
from moeserve.detokenizer.incremental import TokenDecoder
from moeserve.detokenizer.stop import StopFinder
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.sampling import TextOptions
from moeserve.messages.schema import (
    DetokenizeEnd,
    DetokenizeStart,
    Heartbeat,
    HeartbeatRequest,
    RequestError,
    RouterStarted,
    Shutdown,
    StopHit,
    TextItem,
    TextOut,
    ToDetokenizer,
    TokensItem,
    TokensOut,
)

HEARTBEAT_S: Final = 1.0  # seconds between heartbeats to httpserver

log = logging.getLogger(__name__)

_NOTHING_SKIPPED: Final[frozenset[int]] = frozenset()


class RequestText:
    """The text state of one request. Only this class writes its fields."""

    def __init__(self, options: TextOptions, token_bytes: Sequence[bytes], special: Set[int]) -> None:
        skipped = special if options.skip_special_tokens else _NOTHING_SKIPPED
        if options.shown_tokens:
            skipped = skipped - set(options.shown_tokens)
        self._decoder = TokenDecoder(token_bytes, skipped)
        self._finder = StopFinder(options.stop, options.include_stop)
        self._min_tokens = options.min_tokens
        self._start = answer_start(options.reasoning)
        self.num_tokens = 0  # output tokens so far, up to and including the one that completed a stop string
        self.held: TextItem | None = None  # the item with the stop string, until the router's last item

    @property
    def stop_hit(self) -> bool:
        return self._finder.hit is not None

    def resume(self, output: bytes) -> None:
        """Brings the state to where it is after these tokens (int32), whose text a lost detokenizer has already
        sent."""
        self.take(TokensItem(0, array("i", output).tolist()))

    def take(self, item: TokensItem) -> TextItem:
        """Returns the TextItem for a TokensItem, cut after the token that completes a stop string; final if the
        TokensItem is."""
        text = ""
        taken = 0
        for token_id in item.token_ids:
            taken += 1
            decoded = self._decoder.push(token_id)
            if self._start.ends_reasoning(token_id):
                text += self._finder.flush()
            may_stop = self._start.push(token_id, decoded) and self.num_tokens + taken >= self._min_tokens
            text += self._finder.push(decoded, may_stop)
            if self.stop_hit:
                break
        self.num_tokens += taken
        if item.finish_reason is not None and not self.stop_hit:
            text += self._finder.push(self._decoder.flush())
            text += self._finder.flush()
        out = TextItem(
            id=item.id,
            text=text,
            token_ids=item.token_ids[:taken],
            logprobs=None if item.logprobs is None else item.logprobs[:taken],
            prompt_logprobs=item.prompt_logprobs,
            progress=item.progress,
            cached_tokens=item.cached_tokens,
            score=item.score,
        )
        return out if item.finish_reason is None else self.finish(out, item)

    def finish(self, out: TextItem, last: TokensItem) -> TextItem:
        """Returns `out` as the final item. A stop string takes precedence over the router's finish reason."""
        if not self.stop_hit:
            return msgspec.structs.replace(
                out, finish_reason=last.finish_reason, stop_reason=last.stop_token, usage=last.usage
            )
        usage = last.usage
        if usage is not None:
            usage = msgspec.structs.replace(usage, completion_tokens=self.num_tokens)
        return msgspec.structs.replace(out, finish_reason="stop", stop_reason=self._finder.hit, usage=usage)


class Detokenizer:
    """The text states of all open requests. `token_bytes` is the vocabulary by token id; `special` has the ids of
    control tokens."""

    def __init__(self, token_bytes: Sequence[bytes], special: Set[int]) -> None:
        self._token_bytes = token_bytes
        self._special = special
        self._open: dict[int, RequestText] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self, message: DetokenizeStart) -> None:
        text = self._open[message.id] = RequestText(message.text, self._token_bytes, self._special)
        text.resume(message.output)

    def close(self, request_id: int) -> None:
        self._open.pop(request_id, None)  # a request that was refused never had a DetokenizeStart

    def close_all(self) -> list[int]:
        """Returns the ids of the requests that were open."""
        closed = list(self._open)
        self._open.clear()
        return closed

    def tokens(self, message: TokensOut) -> tuple[list[TextItem], list[StopHit]]:
        """Returns the messages to httpserver and to the router for a step's tokens."""
        items: list[TextItem] = []
        hits: list[StopHit] = []
        for item in message.items:
            text = self._open.get(item.id)
            if text is None:
                log.debug("tokens for request %d, which the last detokenizer or router had", item.id)
                continue
            out, hit = self._advance(text, item)
            if out is not None:
                items.append(out)
            if hit is not None:
                hits.append(hit)
        return items, hits

    def _advance(self, text: RequestText, item: TokensItem) -> tuple[TextItem | None, StopHit | None]:
        ends = item.finish_reason is not None
        if ends:
            del self._open[item.id]
        if text.held is not None:  # a stop string has ended the request: later tokens are dropped
            return (text.finish(text.held, item) if ends else None), None
        out = text.take(item)
        if text.stop_hit and not ends:
            text.held = out
            return None, StopHit(id=item.id, num_tokens=text.num_tokens)
        return out, None


def serve(
    detokenizer: Detokenizer,
    inbox: PullChannel[ToDetokenizer],
    to_router: PushChannel,
    to_http: PushChannel,
    request_tracer: DetokenizeTracer | None = None,
    heartbeat: Callable[[], None] = lambda: None,
) -> None:
    """Handles messages until Shutdown and sleeps while there are none. Sends httpserver a heartbeat every HEARTBEAT_S.
    `heartbeat` is called when the launcher asks for one. Raises ChannelFull when the router or httpserver takes no
    messages, CodecError for a malformed message."""
    beat_at = 0.0
    while True:
        now = time.monotonic()
        if now >= beat_at and to_http.try_send(Heartbeat("detokenizer")):
            beat_at = now + HEARTBEAT_S
        message = inbox.recv(HEARTBEAT_S)
        match message:
            case RouterStarted():
                for request_id in detokenizer.close_all():
                    if request_tracer is not None:
                        request_tracer.closed(request_id, "its router was lost")
            case DetokenizeStart():
                detokenizer.open(message)
                if request_tracer is not None:
                    request_tracer.opened(message)
            case DetokenizeEnd():
                detokenizer.close(message.id)
                if request_tracer is not None:
                    request_tracer.closed(message.id, "its client has gone")
            case TokensOut():
                since = time.monotonic()
                items, hits = detokenizer.tokens(message)
                done = time.monotonic()  # before other processes can know the request
                for hit in hits:
                    to_router.send(hit)
                if items:
                    to_http.send(TextOut(items=items))
                if request_tracer is not None:
                    request_tracer.tokens(items, hits, since, done)
            case RequestError():
                detokenizer.close(message.id)
                to_http.send(message)
                if request_tracer is not None:
                    request_tracer.closed(message.id, message.message)
            case HeartbeatRequest():
                heartbeat()
            case Shutdown():
                return
            case None:  # no message has come for a while
                continue
