"""/completion, /infill and /props.

Source: llama-server's README and `server-task.cpp`, of 2026.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

from moeserve import __version__
from moeserve.httpserver.generation.prepare import prepare
from moeserve.httpserver.generation.prepared import PreparedRequest
from moeserve.httpserver.generation.request.caller import Caller, caller_of
from moeserve.httpserver.generation.request.pictures import MEDIA_MARKER
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.generation.usage import Timings, UsageTally, prompt_progress
from moeserve.httpserver.llama_server.bodies import CompletionBody, InfillBody, MultimodalPrompt
from moeserve.httpserver.llama_server.objects import (
    CompletionChunk,
    CompletionPiece,
    GenerationSettings,
    LlamaCompletion,
    LlamaTimings,
    Props,
    fields_of,
    probabilities,
    sampler_object,
)
from moeserve.httpserver.llama_server.text_limits import TextLimits
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.sse import EventStream, JsonResponse, answer
from moeserve.messages.schema import TextItem, Usage
from moeserve.sampling.parameters import DEFAULTS

router = APIRouter(tags=["llama-server"], route_class=DocumentedRoute)


@router.post(
    "/completion",
    openapi_extra=documented(
        CompletionBody, {"prompt": "Once upon a time", "n_predict": 32}, stream=CompletionChunk
    ),
    responses={200: {"model": LlamaCompletion, "description": "With stream true: chunks."}},
)
async def completion(request: Request) -> Response:
    """Completes a prompt in llama-server's format."""
    caller = caller_of(request)
    return await _answer(request, await read_body(request, CompletionBody), caller)


@router.post(
    "/infill",
    openapi_extra=documented(
        InfillBody,
        {"input_prefix": "def hello():\n    ", "input_suffix": "\n", "n_predict": 32},
        stream=CompletionChunk,
    ),
    responses={200: {"model": LlamaCompletion, "description": "With stream true: chunks."}},
)
async def infill(request: Request) -> Response:
    """Generates the text between a prefix and a suffix, for editors (fill-in-the-middle)."""
    caller = caller_of(request)
    return await _answer(request, await read_body(request, InfillBody), caller)


async def _answer(request: Request, body: CompletionBody, caller: Caller) -> Response:
    handler = CompletionHandler(service_of(request), body, caller)
    if body.stream:
        return EventStream(_only(body, handler.chunks()), end=b"")
    return await answer(request, _whole(handler))


async def _only(
    body: CompletionBody, chunks: AsyncGenerator[CompletionChunk | LlamaCompletion, None]
) -> AsyncGenerator[Mapping[str, Any], None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            yield fields_of(chunk, body.response_fields) if chunk["stop"] else chunk


async def _whole(handler: CompletionHandler) -> Mapping[str, Any] | list[Mapping[str, Any]]:
    fields = handler.body.response_fields
    found = await handler.whole()
    return [fields_of(one, fields) for one in found] if isinstance(found, list) else fields_of(found, fields)


@router.get("/props", responses={200: {"model": Props}})
async def props(request: Request) -> Response:
    """The context's length, the chat template and the default settings."""
    service = service_of(request)
    served = service.ready(None)
    text, limit = served.text, served.limit
    vocabulary = text.tokenizer.vocabulary
    defaults = service.sampling_defaults
    settings = replace(DEFAULTS, **defaults.settings)
    n_predict = -1 if defaults.max_tokens is None else defaults.max_tokens
    found: Props = {
        "default_generation_settings": {
            "n_ctx": limit,
            "params": {**sampler_object(settings), "n_predict": n_predict},
        },
        "total_slots": service.config.max_num_seqs,
        "model_alias": service.model_name,
        "model_path": service.model_name,  # the name: clients must not learn the file's path
        "chat_template": text.renderer.source or "",
        "bos_token": "" if vocabulary.bos_id is None else text.token_text(vocabulary.bos_id),
        "eos_token": text.token_text(vocabulary.eos_ids[0]) if vocabulary.eos_ids else "",
        "media_marker": MEDIA_MARKER,
        "modalities": {"vision": text.pictures is not None, "audio": False},
        "build_info": f"moeserve {__version__}",
    }
    return JsonResponse(found)


@dataclass
class CompletionHandler:
    service: Service
    body: CompletionBody
    caller: Caller

    async def whole(self) -> LlamaCompletion | list[LlamaCompletion]:
        """Returns a list if several answers were asked for."""
        prepared = await self._prepare()
        kept: list[list[TextItem]] = [[] for _ in prepared.requests]
        async for index, item in self._limited(prepared):
            kept[index].append(item)
        answers = [self._answer(prepared, items) for items in kept]
        return answers[0] if len(answers) == 1 else answers

    def _answer(self, prepared: PreparedRequest, items: list[TextItem]) -> LlamaCompletion:
        ids = [token for item in items for token in item.token_ids] if self.body.return_tokens else []
        answer = self._end(prepared, items[-1], "".join(item.text for item in items), ids)
        if (usage := items[-1].usage) is not None:
            answer["tokens_predicted"] = usage.completion_tokens  # of this answer alone
        self._add_probabilities(answer, prepared, items)
        return answer

    async def chunks(self) -> AsyncGenerator[CompletionChunk | LlamaCompletion, None]:
        prepared = await self._prepare()
        first = None
        async with aclosing(self._limited(prepared)) as items:
            async for _, item in items:
                if item.finish_reason is not None:
                    end = self._end(prepared, item, item.text, item.token_ids)
                    self._add_probabilities(end, prepared, [item])
                    yield end
                elif item.text or item.token_ids or item.progress is not None:
                    chunk = cast(CompletionChunk, self._piece(prepared, item.text, item.token_ids))
                    if item.progress is not None:
                        chunk["prompt_progress"] = prompt_progress(item.progress)
                    if self.body.timings_per_token:
                        first = first or time.monotonic()
                        chunk["timings"] = self._timings_so_far(prepared.tally, first)
                    self._add_probabilities(chunk, prepared, [item])
                    yield chunk

    async def _limited(self, prepared: PreparedRequest) -> AsyncGenerator[tuple[int, TextItem], None]:
        """Yields the answers' items up to the limits of their lines. Each answer's last item has a `finish_reason`. The
        items are counted in the tally."""
        body, number = self.body, len(prepared.requests)
        seconds = body.t_max_predict_ms / 1e3 if body.t_max_predict_ms > 0 else None
        limits = [TextLimits(body.n_indent, seconds) for _ in range(number)]
        ended = 0
        async with prepared.stream() as stream:
            async for index, item in stream:
                if limits[index].is_reached:
                    continue  # this generation continues until the others have ended, too
                kept = limits[index].take(item.text) if item.text else item.text
                if limits[index].is_reached and item.finish_reason is None:
                    usage = self._usage_so_far(prepared, limits[index], item)
                    item = replace(item, text=kept, finish_reason="length", usage=usage)
                elif kept != item.text:
                    item = replace(item, text=kept, finish_reason="length")
                prepared.tally.take(index, item)
                yield index, item
                ended += item.finish_reason is not None
                if ended == number:
                    return

    def _usage_so_far(self, prepared: PreparedRequest, limits: TextLimits, item: TextItem) -> Usage:
        """Returns the usage of an answer that ends at a limit of its lines, as measured by this process: the prompt's
        time includes the time in the queue."""
        usage = prepared.tally.usage()
        length = len(prepared.resolved.prompts[0])
        prefill = (limits.began_at - self.caller.arrival) * 1e3
        decode = (time.monotonic() - limits.began_at) * 1e3
        tokens = usage["completion_tokens"] + len(item.token_ids)
        return Usage(length, tokens, 0, 0.0, prefill, decode)

    async def _prepare(self) -> PreparedRequest:
        """Raises ApiError."""
        return await prepare(self.service, self.body.asked(self.caller))

    def _piece(self, prepared: PreparedRequest, text: str, ids: list[int]) -> CompletionPiece:
        usage = prepared.tally.usage()
        return {
            "index": 0,
            "content": text,
            "tokens": ids,
            "stop": False,
            "id_slot": -1,  # no slot: all requests share one cache
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
        }

    def _timings_so_far(self, tally: UsageTally, first: float) -> LlamaTimings:
        """Returns the timings as measured by this process: the prompt's time includes the time in the queue. The last
        chunk has the engine's exact timings."""
        usage, decoded = tally.usage(), time.monotonic() - first
        return _llama_timings(
            cached=0,
            read=usage["prompt_tokens"],
            prefill_ms=round((first - self.caller.arrival) * 1e3, 3),
            written=usage["completion_tokens"],
            decode_ms=round(decoded * 1e3, 3),
        )

    def _add_probabilities(
        self, piece: CompletionPiece, prepared: PreparedRequest, items: Sequence[TextItem]
    ) -> None:
        if self.body.n_probs:
            tokens = [token for item in items for token in item.logprobs or ()]
            piece["completion_probabilities"] = probabilities(prepared.text, tokens, self.body.n_probs)

    def _end(self, prepared: PreparedRequest, end: TextItem, text: str, ids: list[int]) -> LlamaCompletion:
        prompt = self.body.prompt
        word = end.stop_reason if isinstance(end.stop_reason, str) else ""
        return {
            **self._piece(prepared, text, ids),
            "stop": True,
            "model": self.service.answering(self.body.model),
            "prompt": prompt.prompt_string if isinstance(prompt, MultimodalPrompt) else prompt,
            "generation_settings": self._settings(prepared),
            "stop_type": "limit" if end.finish_reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "truncated": False,
            "tokens_cached": prepared.tally.usage()["total_tokens"],
            "timings": _timings(prepared.tally.timings()),
        }

    def _settings(self, prepared: PreparedRequest) -> GenerationSettings:
        sampling = prepared.requests[0].sampling
        return {
            "seed": sampling.seed,
            **sampler_object(sampling),
            "n_predict": self.body.n_predict,
            "stop": self.body.stop,
        }


def _timings(timings: Timings) -> LlamaTimings:
    found: LlamaTimings = {
        **_llama_timings(
            cached=timings["cached_tokens"],
            read=timings["prompt_tokens"] - timings["cached_tokens"],
            prefill_ms=timings["prefill_ms"],
            written=timings["completion_tokens"],
            decode_ms=timings["decode_ms"],
        ),
        "prompt_per_second": timings["prefill_tokens_per_second"],
        "predicted_per_second": timings["decode_tokens_per_second"],
    }
    if timings["draft_tokens"]:
        found["draft_n"] = timings["draft_tokens"]
        found["draft_n_accepted"] = timings["accepted_draft_tokens"]
    return found


def _llama_timings(
    *, cached: int, read: int, prefill_ms: float, written: int, decode_ms: float
) -> LlamaTimings:
    return {
        "cache_n": cached,
        "prompt_n": read,
        "prompt_ms": prefill_ms,
        "prompt_per_token_ms": prefill_ms / read if read else None,
        "prompt_per_second": read / prefill_ms * 1e3 if prefill_ms else None,
        "predicted_n": written,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": decode_ms / written if written else None,
        "predicted_per_second": written / decode_ms * 1e3 if decode_ms else None,
    }
