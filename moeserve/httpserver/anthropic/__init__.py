"""Anthropic's Messages API, with Anthropic's error shape."""

from moeserve.httpserver.anthropic import routes
from moeserve.httpserver.anthropic.bodies import CountTokensRequest, MessagesRequest
from moeserve.httpserver.anthropic.errors import MessagesError, messages_error
from moeserve.httpserver.anthropic.objects import MessageEvent
from moeserve.httpserver.transport.api_table import Api

API = Api(
    name="anthropic",
    routers=(routes.router,),
    bodies=(MessagesRequest, CountTokensRequest),
    streamed=(MessageEvent,),
    batched={"/v1/messages": routes.create_message},
    error_body=messages_error,
    error_model=MessagesError,
    prefix="/v1/messages",
    request_id_header="request-id",
)
