"""OpenAI's completions and chat API, with the additional fields of vLLM, SGLang and llama-server. Its errors have
the default shape."""

from moeserve.httpserver.openai import apply_template, chat, completions
from moeserve.httpserver.openai.chat_body import ChatCompletionRequest
from moeserve.httpserver.openai.completion_body import CompletionRequest
from moeserve.httpserver.openai.objects import ChatCompletionChunk
from moeserve.httpserver.transport.api_table import Api

API = Api(
    name="openai",
    routers=(completions.router, chat.router, apply_template.router),
    bodies=(CompletionRequest, ChatCompletionRequest),
    streamed=(ChatCompletionChunk,),
    batched={
        "/v1/chat/completions": chat.create_chat_completion,
        "/v1/completions": completions.create_completion,
    },
)
