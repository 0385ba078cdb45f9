"""From a GenerationSpec to requests for the engine: everything that may refuse a request happens here."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from moeserve.httpserver.generation import dry_breakers, token_choice
from moeserve.httpserver.generation.chat import conversation
from moeserve.httpserver.generation.chat.answers import AnswerReader
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.engine.engine_client import EngineClient
from moeserve.httpserver.generation.engine.generation_stream import GenerationStream
from moeserve.httpserver.generation.request.sampling_defaults import SamplingDefaults
from moeserve.httpserver.generation.request.spec import GenerationSpec
from moeserve.httpserver.generation.request.structured_output import compile_grammar
from moeserve.httpserver.generation.service import Service
from moeserve.httpserver.generation.usage import UsageTally
from moeserve.messages.schema import GenerateRequest, TextItem


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One HTTP request, ready for the engine. Choices are ordered by prompt, then by number."""

    engine: EngineClient
    text: ModelText
    prompt_ids: list[list[int]]
    requests: list[GenerateRequest]  # one a choice
    readers: list[AnswerReader]  # one a choice of a conversation; empty for plain prompts
    tally: UsageTally
    stop_token_ids: tuple[int, ...]  # the client's own

    def stream(self) -> GenerationStream:
        """Use it as `async with prepared.stream() as stream`."""
        return GenerationStream(self.engine, self.requests, "chat" if self.readers else "text_completion")

    async def complete(self) -> list[list[TextItem]]:
        """Returns all items of each request. Raises ApiError."""
        answers: list[list[TextItem]] = [[] for _ in self.requests]
        async with self.stream() as stream:
            async for index, item in stream:
                answers[index].append(item)
        return answers

    def stop_reason(self, end: TextItem) -> str | int | None:
        """Returns the client's stop string or token; None for the tag that ends the only call that is allowed."""
        is_tag = end.stop_reason is not None and end.stop_reason == self.text.formats.call_end
        return None if is_tag and end.stop_reason not in self.stop_token_ids else end.stop_reason


def _set_defaults(spec: GenerationSpec, defaults: SamplingDefaults) -> None:
    """Sets the server's own defaults where the client has chosen nothing."""
    if spec.chosen is None:
        return
    spec.sampler = replace(
        spec.sampler, **{name: value for name, value in defaults.settings.items() if name not in spec.chosen}
    )
    if spec.default_max_tokens is None:  # else the API's, or the client's own
        spec.default_max_tokens = defaults.max_tokens


async def prepare(service: Service, spec: GenerationSpec) -> PreparedRequest:
    """Resolves the spec against the model and freezes it. Raises ApiError."""
    text, limit = service.ready(spec.model)
    service.request_builder.check_room(len(spec.prompts) if spec.messages is None else 1, spec)
    _set_defaults(spec, service.sampling_defaults)
    token_choice.resolve(spec, text)
    await dry_breakers.resolve(spec, text.tokenizer)
    end = None
    if spec.messages is None:
        prompts = await _encode(text, limit, spec)
    else:
        prompts = [await conversation.encode(text, limit, spec)]
        end = conversation.resolve(spec, text, prompts[0])
    if spec.truncate_prompt_tokens is not None:
        prompts = [_last_tokens(prompt, limit, spec) for prompt in prompts]
    if spec.grammar is not None:
        spec.compiled_grammar = await compile_grammar(service.grammars, spec, spec.grammar)
    spec.adapter = service.adapter_of(spec.model)
    requests = service.request_builder.build(text, prompts, spec)
    readers = [] if end is None else [conversation.reader(spec, text.formats, end) for _ in requests]
    tally = UsageTally([len(prompt) for prompt in prompts], spec.n)
    return PreparedRequest(service.engine, text, prompts, requests, readers, tally, spec.stop_token_ids)


def _last_tokens(prompt: list[int], limit: int, spec: GenerationSpec) -> list[int]:
    """Returns the end of a prompt: as much as `truncate_prompt_tokens` says, which must fit with the answer."""
    assert spec.truncate_prompt_tokens is not None
    most = spec.truncate_prompt_tokens
    if most < 0:
        most = max(limit - max(spec.max_tokens or spec.default_max_tokens or 1, 1), 1)
    return prompt[-most:]


async def count_prompt_tokens(service: Service, spec: GenerationSpec) -> int:
    """Returns the length of a conversation's prompt in tokens. Raises ApiError."""
    text, limit = service.ready(spec.model)
    return len(await conversation.encode(text, limit, spec))


async def _encode(text: ModelText, limit: int, spec: GenerationSpec) -> list[list[int]]:
    """Returns the token ids of each plain prompt."""
    texts = [prompt for prompt in spec.prompts if isinstance(prompt, str)]
    encoded = iter(await text.encode(texts, limit=limit, param=spec.prompt_param) if texts else [])
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in spec.prompts]
