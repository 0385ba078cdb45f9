"""llama-server's /apply-template: the rendered prompt of a chat request. The body is the same as for
/v1/chat/completions. Source: llama-server's README, of 2026."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from moeserve.httpserver.generation.chat import chat_prompt
from moeserve.httpserver.generation.chat.pdf_texts import with_pdf_texts
from moeserve.httpserver.generation.engine.request_deadline import request_deadline
from moeserve.httpserver.generation.request.caller import caller_of
from moeserve.httpserver.generation.service import service_of
from moeserve.httpserver.openai.chat_body import ChatCompletionRequest
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.sse import JsonResponse

router = APIRouter(tags=["llama-server"], route_class=DocumentedRoute)


class AppliedTemplate(TypedDict):
    prompt: str


@router.post(
    "/apply-template",
    openapi_extra=documented(ChatCompletionRequest, {"messages": [{"role": "user", "content": "Hello"}]}),
    responses={200: {"model": AppliedTemplate}},
)
async def apply_template(request: Request) -> Response:
    """Renders the conversation of a chat request with the chat template."""
    caller = caller_of(request)
    body = await read_body(request, ChatCompletionRequest)
    service = service_of(request)
    served = service.ready(body.model)
    text, limit = served.text, served.limit
    asked = body.asked(caller)
    async with request_deadline(caller.arrival, service.engine.request_timeout):
        prompt = await with_pdf_texts(text, limit, asked, body.chat_prompt(), service.pdfs)
    pieces = await chat_prompt.render(text, limit, asked, prompt)
    applied: AppliedTemplate = {
        "prompt": "".join(pieces) if text.pictures is None else text.pictures.shown(pieces)
    }
    return JsonResponse(applied)
