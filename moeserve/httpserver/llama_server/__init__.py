"""llama-server's own API, for the clients of llama.cpp. Its errors have the default shape."""

from moeserve.httpserver.llama_server import routes
from moeserve.httpserver.llama_server.bodies import CompletionBody, InfillBody
from moeserve.httpserver.llama_server.objects import CompletionChunk
from moeserve.httpserver.transport.api_table import Api

API = Api(
    name="llama_server",
    routers=(routes.router,),
    bodies=(CompletionBody, InfillBody),
    streamed=(CompletionChunk,),
)
