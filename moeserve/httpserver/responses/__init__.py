"""OpenAI's Responses API, with a store of its own. Its errors have the default shape."""

from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.httpserver.responses import routes
from moeserve.httpserver.responses.background import BackgroundResponses
from moeserve.httpserver.responses.bodies import InputTokensRequest, ResponsesRequest
from moeserve.httpserver.responses.objects import ResponseEvent
from moeserve.httpserver.responses.store import ResponseStore
from moeserve.httpserver.transport.api_table import Api


def _open_state(config: ServerConfig) -> routes.ResponsesState:
    """Opens the store of responses in --data-dir. Raises ConfigError if it cannot be used."""
    store = ResponseStore(None if config.data_dir is None else Path(config.data_dir))
    return routes.ResponsesState(store, BackgroundResponses(store))


API = Api(
    name=routes.API_NAME,
    routers=(routes.router,),
    bodies=(ResponsesRequest, InputTokensRequest),
    streamed=(ResponseEvent,),
    batched={"/v1/responses": routes.create_response},
    open_state=_open_state,
)
