"""Turns a request into messages to the engine, or refuses it."""

from __future__ import annotations

from moeserve.httpserver.generation.chat import chat_prompt
from moeserve.httpserver.generation.chat.answer_form import AnswerForm, form_of
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.chat.pdf_texts import with_pdf_texts
from moeserve.httpserver.generation.chat.picture_tokens import NO_CHAT, ChatTokens
from moeserve.httpserver.generation.engine.request_deadline import request_deadline
from moeserve.httpserver.generation.prepared import PreparedRequest
from moeserve.httpserver.generation.request.asked import Asked, ChatPrompt, FimPrompt, PlainPrompts
from moeserve.httpserver.generation.request.pictures import PicturedText
from moeserve.httpserver.generation.request.tool_use import ToolUse
from moeserve.httpserver.generation.resolve.dry_breakers import breakers_of
from moeserve.httpserver.generation.resolve.fim_prompt import encode_fim
from moeserve.httpserver.generation.resolve.resolved import Resolved
from moeserve.httpserver.generation.resolve.room import check_room
from moeserve.httpserver.generation.resolve.sampler import with_defaults
from moeserve.httpserver.generation.resolve.served import Served
from moeserve.httpserver.generation.resolve.structured_output import compile_grammar
from moeserve.httpserver.generation.resolve.token_choice import token_choice
from moeserve.httpserver.generation.service import Service
from moeserve.httpserver.generation.usage import UsageTally


async def prepare(service: Service, asked: Asked) -> PreparedRequest:
    """Resolves the request against the model and freezes it. Raises ApiError: 400 for a field that this model or
    server cannot follow, 404 for an unknown model, 503 if there is no room or the engine is not ready, 504 if pictures
    or PDFs are not read in time."""
    served = service.ready(asked.model)
    check_room(asked, service.max_generations, service.engine.room, served.max_num_seqs)
    resolved = await _resolve(service, served, asked)
    requests = service.request_builder.build(served, resolved)
    reading = resolved.form.reading
    readers = [] if reading is None else [reading.reader() for _ in requests]
    tally = UsageTally([len(prompt) for prompt in resolved.prompts], asked.n)
    return PreparedRequest(service.engine, served.text, resolved, requests, readers, tally)


async def _resolve(service: Service, served: Served, asked: Asked) -> Resolved:
    text, limit, chat = served.text, served.limit, NO_CHAT
    sampler, bound = with_defaults(asked, service.sampling_defaults)
    choice = token_choice(asked, text)
    breakers = await breakers_of(asked, sampler, text.tokenizer)
    if isinstance(asked.prompt, ChatPrompt):
        chat = await _encode_chat(service, text, limit, asked, asked.prompt)
        prompts = [chat.ids]
        form, tools = form_of(asked, asked.prompt, choice.grammar, text, prompts[0]), asked.prompt.tools
    elif asked.pictures:
        chat = await _encode_pictured(service, text, limit, asked)
        prompts = [chat.ids]
        form, tools = AnswerForm(choice.grammar), ToolUse()
    else:
        prompts = await _encode(text, limit, asked, bound, asked.prompt)
        form, tools = AnswerForm(choice.grammar), ToolUse()
    prompts = [_last_tokens(prompt, limit, asked, bound) for prompt in prompts]
    compiled = ""
    if form.grammar is not None:
        compiled = await compile_grammar(service.grammars, asked, form.grammar, tools)
    has_middle = not isinstance(asked.prompt, ChatPrompt) and any(
        isinstance(one, FimPrompt) for one in asked.prompt
    )
    return Resolved(
        asked,
        prompts=tuple(prompts),
        sampler=sampler,
        default_max_tokens=bound,
        logit_bias={**choice.logit_bias, **form.logit_bias},
        bad_sequences=choice.bad_sequences,
        dry_breakers=breakers,
        form=form,
        grammar=compiled,
        adapter=service.adapter_of(asked.model),
        chat=chat,
        fim_ends=text.fim.ends if has_middle and text.fim is not None else (),
    )


def _last_tokens(prompt: list[int], limit: int, asked: Asked, bound: int | None) -> list[int]:
    """Returns the last `truncate_prompt_tokens` tokens of a prompt. They must leave room for the answer."""
    most = asked.truncate_prompt_tokens
    if most is None:
        return prompt
    if most < 0:
        most = max(limit - max(asked.max_tokens or bound or 1, 1), 1)
    return prompt[-most:]


async def count_prompt_tokens(service: Service, asked: Asked) -> int:
    """Returns the length of a conversation's prompt in tokens. Raises ApiError as `prepare` does for a prompt."""
    return len(await chat_token_ids(service, asked))


async def chat_token_ids(service: Service, asked: Asked) -> list[int]:
    """Returns a conversation's prompt as token ids. In the places of a picture's embeddings they are the model's
    placeholder. Raises ApiError as `prepare` does for a prompt."""
    served = service.ready(asked.model)
    assert isinstance(asked.prompt, ChatPrompt)
    return (await _encode_chat(service, served.text, served.limit, asked, asked.prompt)).ids


async def _encode_chat(
    service: Service, text: ModelText, limit: int, asked: Asked, prompt: ChatPrompt
) -> ChatTokens:
    """Returns the tokens of a conversation. Raises ApiError; 504 if its pictures are not encoded and
    its PDFs not read in time."""
    client = service.picture_client(asked)
    async with request_deadline(asked.caller.arrival, service.engine.request_timeout):
        prompt = await with_pdf_texts(text, limit, asked, prompt, service.pdfs)
        return await chat_prompt.encode(text, limit, asked, prompt, client)


async def _encode_pictured(service: Service, text: ModelText, limit: int, asked: Asked) -> ChatTokens:
    """Returns the tokens of a plain prompt with pictures. Raises ApiError; see `_encode_chat`."""
    client = service.picture_client(asked)
    assert not isinstance(asked.prompt, ChatPrompt)
    [prompt] = asked.prompt
    assert isinstance(prompt, PicturedText), "it has pictures"
    async with request_deadline(asked.caller.arrival, service.engine.request_timeout):
        return await chat_prompt.encode_plain(text, limit, asked, prompt, client)


async def _encode(
    text: ModelText, limit: int, asked: Asked, bound: int | None, prompts: PlainPrompts
) -> list[list[int]]:
    """Returns the token ids of each plain prompt."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await text.encode(texts, limit=limit, param=asked.prompt_param) if texts else [])
    found = []
    for prompt in prompts:
        match prompt:
            case str():
                found.append(next(encoded))
            case FimPrompt():
                found.append(await encode_fim(text, limit, asked, bound, prompt))
            case PicturedText():
                raise AssertionError("`_encode_pictured` takes it")
            case _:
                found.append(prompt)
    return found
