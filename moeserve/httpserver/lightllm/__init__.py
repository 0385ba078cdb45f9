"""LightLLM's own API. Its errors have the default shape."""

from moeserve.httpserver.lightllm import routes
from moeserve.httpserver.lightllm.bodies import GenerateRequestBody
from moeserve.httpserver.lightllm.objects import GenerateEvent
from moeserve.httpserver.transport.api_table import Api

API = Api(
    name="lightllm",
    routers=(routes.router,),
    bodies=(GenerateRequestBody,),
    streamed=(GenerateEvent,),
)
