"""/tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.generation.chat.chat_messages import Messages
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.prepare import chat_token_ids
from moeserve.httpserver.generation.request.asked import Asked, ChatPrompt
from moeserve.httpserver.generation.request.attachments import pdfs_in, pictures_in
from moeserve.httpserver.generation.request.caller import Caller, caller_of
from moeserve.httpserver.generation.request.tool_use import ToolUse
from moeserve.httpserver.generation.resolve.token_ids import check_ids
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.native.bodies import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenPiece,
)
from moeserve.httpserver.native.objects import TokenizerInfo
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.errors import invalid
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.sse import JsonResponse, answer

router = APIRouter(tags=["Tokenizer"], route_class=DocumentedRoute)


@router.post(
    "/tokenize",
    openapi_extra=documented(TokenizeRequest, {"prompt": "Hello"}),
    responses={200: {"model": TokenizeResponse}},
)
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt, or of a conversation as the chat template writes it."""
    body = await read_body(request, TokenizeRequest)
    service, caller = service_of(request), caller_of(request)
    served = service.ready(body.model)
    if body.messages is not None and (pictures_in(body.messages) or pdfs_in(body.messages)):
        return await answer(request, _tokenized_with_files(body, body.messages, service, caller))
    return await answer(request, _tokenized(body, served.text, served.limit, caller.tenant))


@router.post(
    "/detokenize",
    openapi_extra=documented(DetokenizeRequest, {"tokens": [1, 2, 3]}),
    responses={200: {"model": DetokenizeResponse}},
)
async def detokenize(request: Request) -> Response:
    """The text of token ids, control tokens included."""
    body = await read_body(request, DetokenizeRequest)
    text = service_of(request).ready(body.model).text
    check_ids("tokens", body.tokens, text.vocab_size)
    return await answer(request, _detokenized(body, text))


@router.get("/tokenizer_info", responses={200: {"model": TokenizerInfo}})
async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's special tokens and the chat template (vLLM)."""
    served = service_of(request).ready(None)
    text, limit = served.text, served.limit
    vocabulary = text.tokenizer.vocabulary
    eos = text.token_text(vocabulary.eos_ids[0]) if vocabulary.eos_ids else None
    info: TokenizerInfo = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if vocabulary.bos_id is None else text.token_text(vocabulary.bos_id),
        "eos_token": eos,
        "pad_token": eos,
        "add_bos_token": vocabulary.add_bos,
        "chat_template": text.renderer.source,
        "model_max_length": limit,
        "vocab_size": text.vocab_size,
    }
    return JsonResponse(info)


async def _tokenized(body: TokenizeRequest, text: ModelText, limit: int, tenant: str) -> TokenizeResponse:
    add_special = body.add_special_tokens
    if body.messages is not None:
        pieces = await text.render_chat(
            [message.for_template() for message in body.messages],
            tools=[definition.tool().for_template() for definition in body.tools] or None,
            add_generation_prompt=body.add_generation_prompt,
            kwargs=body.chat_template_kwargs,
            limit=limit,
            tenant=tenant,
        )
        ids = await text.encode_chat(pieces, tenant, add_special=bool(add_special))
    elif body.prompt is not None:
        (ids,) = await text.encode(
            [body.prompt],
            limit=limit,
            param="prompt",
            add_special=True if add_special is None else add_special,
        )
    else:
        assert body.content is not None  # the model's validator
        (ids,) = await text.encode([body.content], limit=limit, param="content", add_special=body.add_special)
    return _response(body, text, limit, ids)


async def _tokenized_with_files(
    body: TokenizeRequest, messages: Messages, service: Service, caller: Caller
) -> TokenizeResponse:
    """Has the pictures encoded and the PDFs read, which alone tells how many tokens they take."""
    if body.add_special_tokens:
        raise invalid("add_special_tokens", "cannot be combined with pictures or PDFs")
    prompt = ChatPrompt(
        messages=[message.for_template() for message in messages],
        pictures=pictures_in(messages),
        pdfs=pdfs_in(messages),
        tools=ToolUse(tuple(definition.tool() for definition in body.tools)),
        template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
    )
    asked = Asked(caller=caller, prompt=prompt, prompt_param="messages", model=body.model)
    ids = await chat_token_ids(service, asked)
    served = service.ready(body.model)
    return _response(body, served.text, served.limit, ids)


def _response(body: TokenizeRequest, text: ModelText, limit: int, ids: list[int]) -> TokenizeResponse:
    names = [text.token_text(token_id) for token_id in ids] if body.return_token_strs else None
    tokens = [_piece(text, token_id) for token_id in ids] if body.with_pieces else ids
    return {"count": len(ids), "max_model_len": limit, "tokens": tokens, "token_strs": names}


def _piece(text: ModelText, token_id: int) -> TokenPiece:
    """Returns a token's piece in llama-server's form: the text, or a list of bytes if they are not whole characters."""
    piece = text.token_bytes(token_id)
    try:
        return {"id": token_id, "piece": piece.decode("utf-8")}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(piece)}


async def _detokenized(body: DetokenizeRequest, text: ModelText) -> DetokenizeResponse:
    decoded = await text.decode(body.tokens)
    return {"prompt": decoded, "content": decoded}
