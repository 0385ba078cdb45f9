"""/completion and /props.

Source: llama-server's README and `server-task.cpp`, of 2026.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from moeserve import __version__
from moeserve.httpserver.generation.prepare import PreparedRequest, prepare
from moeserve.httpserver.generation.request.spec import GenerationSpec
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.generation.usage import Timings, prompt_progress
from moeserve.httpserver.llama_server.bodies import CompletionBody
from moeserve.httpserver.llama_server.objects import (
    CompletionChunk,
    GenerationSettings,
    LlamaCompletion,
    LlamaTimings,
    Props,
)
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.sse import EventStream, JsonResponse, answer
from moeserve.messages.schema import TextItem

router = APIRouter(tags=["llama-server"])


@router.post(
    "/completion",
    openapi_extra=documented(
        CompletionBody, {"prompt": "Once upon a time", "n_predict": 32}, stream=CompletionChunk
    ),
    responses={200: {"model": LlamaCompletion, "description": "With stream true: chunks."}},
)
async def completion(request: Request) -> Response:
    """Completes a prompt, llama-server's way."""
    arrival = time.monotonic()
    body = await read_body(request, CompletionBody)
    handler = CompletionHandler(service_of(request), body, arrival)
    return EventStream(handler.chunks(), end=b"") if body.stream else await answer(request, handler.whole())


@router.get("/props", responses={200: {"model": Props}})
async def props(request: Request) -> Response:
    """What a client of llama-server asks first: the context's length, the template, the defaults."""
    service = service_of(request)
    text, limit = service.ready(None)
    vocabulary = text.tokenizer.vocabulary
    defaults = GenerationSpec(arrival=0.0)
    for name, value in service.sampling_defaults.items():
        setattr(defaults, name, value)
    found: Props = {
        "default_generation_settings": {"n_ctx": limit, "params": _default_settings(defaults)},
        "total_slots": service.config.max_num_seqs,
        "model_alias": service.model_name,
        "model_path": service.model_name,  # the file's own path is nobody's concern
        "chat_template": text.renderer.source or "",
        "bos_token": "" if vocabulary.bos_id is None else text.token_text(vocabulary.bos_id),
        "eos_token": text.token_text(vocabulary.eos_ids[0]) if vocabulary.eos_ids else "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"moeserve {__version__}",
    }
    return JsonResponse(found)


@dataclass
class CompletionHandler:
    service: Service
    body: CompletionBody
    arrival: float

    async def whole(self) -> LlamaCompletion:
        prepared = await self._prepare()
        (items,) = await self.service.engine.complete(prepared.requests, "text_completion")
        prepared.tally.take(0, items[-1])
        ids = [token for item in items for token in item.token_ids] if self.body.return_tokens else []
        return self._end(prepared, items[-1], "".join(item.text for item in items), ids)

    async def chunks(self) -> AsyncGenerator[CompletionChunk, None]:
        prepared = await self._prepare()
        tally = prepared.tally
        async with self.service.engine.start(prepared.requests, "text_completion") as stream:
            async for _, item in stream:
                tally.take(0, item)
                if item.finish_reason is not None:
                    yield self._end(prepared, item, item.text, item.token_ids)
                elif item.text or item.token_ids or item.progress is not None:
                    chunk = self._chunk(prepared, item.text, item.token_ids)
                    if item.progress is not None:
                        chunk["prompt_progress"] = prompt_progress(item.progress)
                    yield chunk

    async def _prepare(self) -> PreparedRequest:
        """Raises ApiError."""
        return await prepare(self.service, self.body.generation_spec(self.arrival))

    def _chunk(self, prepared: PreparedRequest, text: str, ids: list[int]) -> CompletionChunk:
        usage = prepared.tally.usage()
        return {
            "index": 0,
            "content": text,
            "tokens": ids,
            "stop": False,
            "id_slot": -1,  # none: requests share the cache
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
        }

    def _end(self, prepared: PreparedRequest, end: TextItem, text: str, ids: list[int]) -> LlamaCompletion:
        word = end.stop_reason if isinstance(end.stop_reason, str) else ""
        return {
            **self._chunk(prepared, text, ids),
            "stop": True,
            "model": self.service.answering(self.body.model),
            "prompt": self.body.prompt,
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
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "n_predict": self.body.n_predict,
            "stop": self.body.stop,
        }


def _default_settings(spec: GenerationSpec) -> GenerationSettings:
    return {
        "temperature": spec.temperature,
        "top_k": spec.top_k,
        "top_p": spec.top_p,
        "min_p": spec.min_p,
        "repeat_penalty": spec.repetition_penalty,
        "presence_penalty": spec.presence_penalty,
        "frequency_penalty": spec.frequency_penalty,
        "n_predict": -1 if spec.default_max_tokens is None else spec.default_max_tokens,
    }


def _timings(timings: Timings) -> LlamaTimings:
    read = timings["prompt_tokens"] - timings["cached_tokens"]
    written = timings["completion_tokens"]
    return {
        "cache_n": timings["cached_tokens"],
        "prompt_n": read,
        "prompt_ms": timings["prefill_ms"],
        "prompt_per_token_ms": timings["prefill_ms"] / read if read else None,
        "prompt_per_second": timings["prefill_tokens_per_second"],
        "predicted_n": written,
        "predicted_ms": timings["decode_ms"],
        "predicted_per_token_ms": timings["decode_ms"] / written if written else None,
        "predicted_per_second": timings["decode_tokens_per_second"],
    }
