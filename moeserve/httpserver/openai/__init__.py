"""OpenAI's completions and chat API, with vLLM's additional fields. Its errors have the default shape."""

from moeserve.httpserver.openai import chat, completions
from moeserve.httpserver.openai.chat_body import ChatCompletionRequest
from moeserve.httpserver.openai.completion_body import CompletionRequest
from moeserve.httpserver.openai.objects import ChatCompletionChunk
from moeserve.httpserver.transport.api_table import Api

API = Api(
    name="openai",
    routers=(completions.router, chat.router),
    bodies=(CompletionRequest, ChatCompletionRequest),
    streamed=(ChatCompletionChunk,),
)
