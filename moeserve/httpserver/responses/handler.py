"""Answers one request of /v1/responses, as one object or as a stream of events."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from moeserve.chatformat.events import Event, Text
from moeserve.httpserver.generation.beside_streams import beside_streams, values_of
from moeserve.httpserver.generation.chat.answers import Answer
from moeserve.httpserver.generation.logprobs import ChatLogprob, chat_logprobs
from moeserve.httpserver.generation.prepare import prepare
from moeserve.httpserver.generation.prepared import PreparedRequest
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.service import Service
from moeserve.httpserver.generation.usage import UsageTally
from moeserve.httpserver.responses.bodies import InputTokensRequest, ResponsesRequest
from moeserve.httpserver.responses.items import Item, ItemReference, stored_items
from moeserve.httpserver.responses.objects import (
    OutputItem,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
)
from moeserve.httpserver.responses.store import ResponseStore, Stored
from moeserve.httpserver.responses.writer import ItemWriter, new_id, output_of
from moeserve.httpserver.transport.errors import ApiError, invalid
from moeserve.messages.schema import TextItem

log = logging.getLogger(__name__)


async def conversation_of(store: ResponseStore, owner: str, body: InputTokensRequest) -> list[Item]:
    """Returns the items of all responses that a request builds on, oldest first, and then the request's own items, with
    references replaced by the items that they name. owner: the client's `Caller.key_owner`. Raises ApiError 404, and
    400 for a response that has not ended."""
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        for stored in await store.chain(owner, body.previous_response_id):
            if stored.response.get("status") in ("queued", "in_progress"):
                raise invalid(
                    "previous_response_id", f"{stored.id} has not ended yet: wait for it, or cancel it"
                )
            earlier += [*stored.input, *stored.response["output"]]
    items = stored_items(earlier)
    wanted = [item.id for item in body.input if isinstance(item, ItemReference)]
    there = {item.id: item for item in items if not isinstance(item, ItemReference)}
    if missing := [one for one in wanted if one not in there]:
        found = stored_items(await store.items(owner, missing))
        there |= {item.id: item for item in found if not isinstance(item, ItemReference)}
    given = [there[item.id] if isinstance(item, ItemReference) else item for item in body.input]
    return items + given


def error_event(error: ApiError) -> ResponseEvent:
    """Returns the event for a failure before the response has begun."""
    about = {"code": error.code, "message": error.message, "param": error.param}
    return {"type": "error", **about, "sequence_number": 0}  # type: ignore[typeddict-item]


def failure(error: ApiError) -> ResponseFailure:
    return {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}


@dataclass
class ResponsesHandler:
    service: Service
    store: ResponseStore
    body: ResponsesRequest
    id: str
    caller: Caller

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self._items: list[Item] = []  # the items of the whole conversation; the last ones are the request's
        self._given: list[dict[str, Any]] | None = None  # the request's items in their stored form
        # Log-probabilities of tokens whose text will come with a later token.
        self._held: list[ChatLogprob] = []

    async def whole(self) -> ResponseObject:
        prepared = await self.prepare()
        (items,) = await prepared.complete()
        output = await beside_streams(values_of([items]), self._output, prepared, items)
        response = self._finished(output, prepared.tally, is_cut=items[-1].finish_reason == "length")
        await self.store_response(response)
        return response

    def _output(self, prepared: PreparedRequest, items: list[TextItem]) -> list[OutputItem]:
        (reader,) = prepared.readers
        logprobs: list[ChatLogprob] = []
        events: list[Event] = []
        for item in items:
            read = reader.read(item)
            events += read
            found_here = self._logprobs_of(prepared, item)
            if any(isinstance(event, Text) for event in read):
                logprobs += found_here
        prepared.tally.take(0, items[-1], reader.reasoning_tokens)
        is_cut = items[-1].finish_reason == "length"
        encrypt = self.body.wants_encrypted_reasoning
        return output_of(Answer.of(events), logprobs, self.body.toolbox, encrypt=encrypt, is_cut=is_cut)

    async def events(self) -> AsyncGenerator[ResponseEvent, None]:
        writer = ItemWriter(self.body.toolbox, encrypt=self.body.wants_encrypted_reasoning)
        async with aclosing(self.events_of(await self.prepare(), writer)) as events:
            async for event in events:
                yield event

    async def events_of(
        self, prepared: PreparedRequest, writer: ItemWriter
    ) -> AsyncGenerator[ResponseEvent, None]:
        """Yields the response's events. The first event comes with the first token, and a failure before it raises
        ApiError. For a background response the first event comes at once, and no failure raises."""
        in_background = self.body.background
        if in_background:
            for name in ("response.created", "response.queued"):
                yield writer.event(name, response=self.begun("queued"))
        begun = False
        try:
            async with prepared.stream() as stream:
                async for _, item in stream:
                    if not begun:
                        begun = True
                        if not in_background:
                            yield writer.event("response.created", response=self.begun("in_progress"))
                        yield writer.event("response.in_progress", response=self.begun("in_progress"))
                    for event in self._written(writer, prepared, item):
                        yield event
                    if item.finish_reason is None:
                        continue
                    is_cut = item.finish_reason == "length"
                    for event in writer.close("incomplete" if is_cut else "completed"):
                        yield event
                    response = self._finished(writer.output, prepared.tally, is_cut=is_cut)
                    await self.store_response(response)
                    yield writer.event(f"response.{response['status']}", response=response)
        except ApiError as error:
            if not begun and not in_background:
                raise
            for event in writer.close("incomplete"):
                yield event
            response = self.ended(writer, "failed", error)
            if in_background:
                await self.store_response(response)
            yield writer.event("response.failed", response=response)

    def _written(self, writer: ItemWriter, prepared: PreparedRequest, item: TextItem) -> list[ResponseEvent]:
        (reader,) = prepared.readers
        logprobs = self._logprobs_of(prepared, item)
        written: list[ResponseEvent] = []
        for event in reader.read(item):
            written += writer.write(event, logprobs)
            if isinstance(event, Text):
                logprobs = []
        prepared.tally.take(0, item, reader.reasoning_tokens)
        return written

    async def prepare(self) -> PreparedRequest:
        """Joins the stored conversation and the new input, and prepares the request. Raises ApiError with status 404 if
        there is no such conversation, and as generation.prepare does."""
        self._items = await conversation_of(self.store, self.caller.key_owner, self.body)
        return await prepare(self.service, self.body.asked(self.caller, self._items))

    def _logprobs_of(self, prepared: PreparedRequest, item: TextItem) -> list[ChatLogprob]:
        """Returns the log-probabilities of the item's text. Tokens whose text is held back (part of a character or of a
        possible stop string) wait for the item with that text."""
        if not self.body.wants_logprobs:
            return []
        own = chat_logprobs(prepared.text, item.logprobs or [], self.body.top_logprobs, as_ids=False)
        found, self._held = self._held + own, []
        if not item.text and item.finish_reason is None:
            self._held, found = found, []
        return found

    async def store_response(self, response: ResponseObject) -> None:
        if not self.body.store:
            return
        try:
            await self.store.put(self.stored(response))
        except ApiError as error:  # a full disk, say: the client gets its answer anyway
            log.error("the response %s is not stored: %s", self.id, error.message)
            response["store"] = False

    def stored(self, response: ResponseObject) -> Stored:
        """Returns the response and its request in their stored form. `prepare` must have read the request."""
        if self._given is None:
            own = self._items[len(self._items) - len(self.body.input) :]
            self._given = [item.model_dump(mode="json", exclude_none=True) for item in own]
            for item in self._given:
                item.setdefault("id", new_id("item"))
        previous = self.body.previous_response_id
        return Stored(self.id, self.caller.key_owner, previous, self._given, dict(response))

    def begun(self, status: Literal["queued", "in_progress"]) -> ResponseObject:
        response = self._response([])
        response["status"] = status
        return response

    def ended(
        self, writer: ItemWriter, status: Literal["cancelled", "failed"], error: ApiError | None
    ) -> ResponseObject:
        """Returns a response that was ended early, with the output so far."""
        response = self._response(writer.output)
        response["status"] = status
        if error is not None:
            response["error"] = failure(error)
        return response

    def _finished(self, output: list[OutputItem], tally: UsageTally, *, is_cut: bool) -> ResponseObject:
        response = self._response(output)
        response["status"] = "incomplete" if is_cut else "completed"
        response["completed_at"] = None if is_cut else int(time.time())
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        usage = tally.usage()
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        return response

    def _response(self, output: list[OutputItem]) -> ResponseObject:
        body = self.body
        choice = body.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": "in_progress",
            "background": self.body.background,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata,
            "model": self.service.answering(self.body.model),
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": body.store,
            "temperature": body.sampler_settings().temperature,
            "text": {"format": body.text.format.model_dump(mode="json", by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": [tool.model_dump(mode="json", exclude_none=True) for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": body.sampler_settings().top_p,
            "truncation": "disabled",
            "usage": None,
        }
