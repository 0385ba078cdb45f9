"""From what a request asks for to what is sent to the engine: everything that may refuse a request happens here."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.httpserver.generation.chat import chat_prompt
from moeserve.httpserver.generation.chat.answer_form import AnswerForm, form_of
from moeserve.httpserver.generation.chat.answers import AnswerReader
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.engine.engine_client import EngineClient
from moeserve.httpserver.generation.engine.generation_stream import GenerationStream
from moeserve.httpserver.generation.request.asked import Asked, ChatPrompt, PlainPrompts
from moeserve.httpserver.generation.request.tool_use import ToolUse
from moeserve.httpserver.generation.resolve.dry_breakers import breakers_of
from moeserve.httpserver.generation.resolve.resolved import Resolved
from moeserve.httpserver.generation.resolve.room import check_room
from moeserve.httpserver.generation.resolve.sampler import with_defaults
from moeserve.httpserver.generation.resolve.structured_output import compile_grammar
from moeserve.httpserver.generation.resolve.token_choice import asked_grammar, excluded
from moeserve.httpserver.generation.service import Service
from moeserve.httpserver.generation.usage import UsageTally
from moeserve.messages.schema import GenerateRequest, TextItem


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One HTTP request, ready for the engine. Choices are ordered by prompt, then by number."""

    engine: EngineClient
    text: ModelText
    resolved: Resolved
    requests: list[GenerateRequest]  # one a choice
    readers: list[AnswerReader]  # one a choice of a conversation; empty for plain prompts
    tally: UsageTally

    def stream(self) -> GenerationStream:
        """Use it as `async with prepared.stream() as stream`."""
        return GenerationStream(
            self.engine,
            self.requests,
            self.resolved.asked.caller,
            "chat" if self.readers else "text_completion",
        )

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
        is_own = end.stop_reason in self.resolved.asked.stop_token_ids
        return None if is_tag and not is_own else end.stop_reason


async def prepare(service: Service, asked: Asked) -> PreparedRequest:
    """Resolves the request against the model and freezes it. Raises ApiError."""
    text, limit = service.ready(asked.model)
    check_room(asked, service.max_generations, service.engine)
    resolved = await _resolve(service, text, limit, asked)
    requests = service.request_builder.build(text, resolved)
    reader = resolved.form.reader
    readers = [] if reader is None else [reader() for _ in requests]
    tally = UsageTally([len(prompt) for prompt in resolved.prompts], asked.n)
    return PreparedRequest(service.engine, text, resolved, requests, readers, tally)


async def _resolve(service: Service, text: ModelText, limit: int, asked: Asked) -> Resolved:
    sampler, bound = with_defaults(asked, service.sampling_defaults)
    biases, bad_sequences = excluded(asked.bad_words, text)
    given = asked_grammar(asked, text)
    breakers = await breakers_of(asked, sampler, text.tokenizer)
    if isinstance(asked.prompt, ChatPrompt):
        prompts = [await chat_prompt.encode(text, limit, asked, asked.prompt)]
        form, tools = form_of(asked, asked.prompt, given, text, prompts[0]), asked.prompt.tools
    else:
        prompts = await _encode(text, limit, asked, asked.prompt)
        form, tools = AnswerForm(given), ToolUse()
    prompts = [_last_tokens(prompt, limit, asked, bound) for prompt in prompts]
    compiled = ""
    if form.grammar is not None:
        compiled = await compile_grammar(service.grammars, asked, form.grammar, tools)
    return Resolved(
        asked,
        tuple(prompts),
        sampler,
        bound,
        {**asked.logit_bias, **biases, **form.logit_bias},
        bad_sequences,
        breakers,
        form,
        compiled,
        service.adapter_of(asked.model),
    )


def _last_tokens(prompt: list[int], limit: int, asked: Asked, bound: int | None) -> list[int]:
    """Returns the end of a prompt: as much as `truncate_prompt_tokens` says, which must fit with the answer."""
    most = asked.truncate_prompt_tokens
    if most is None:
        return prompt
    if most < 0:
        most = max(limit - max(asked.max_tokens or bound or 1, 1), 1)
    return prompt[-most:]


async def count_prompt_tokens(service: Service, asked: Asked) -> int:
    """Returns the length of a conversation's prompt in tokens. Raises ApiError."""
    text, limit = service.ready(asked.model)
    assert isinstance(asked.prompt, ChatPrompt)
    return len(await chat_prompt.encode(text, limit, asked, asked.prompt))


async def _encode(text: ModelText, limit: int, asked: Asked, prompts: PlainPrompts) -> list[list[int]]:
    """Returns the token ids of each plain prompt."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await text.encode(texts, limit=limit, param=asked.prompt_param) if texts else [])
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
