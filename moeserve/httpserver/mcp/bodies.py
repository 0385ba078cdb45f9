"""The request bodies and answers of /v1/mcp."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from moeserve.httpserver.transport.request_model import FreeDict, RequestModel

SessionText = Annotated[
    str,
    Field(
        max_length=1100,
        pattern=r"^\d{4}-\d\d-\d\d( [\x21-\x7e]{1,1024})?$",
        description="`session` of an earlier answer of the same server, so that the call belongs to it.",
    ),
]


class ListToolsBody(RequestModel):
    session: SessionText | None = None


class CallToolBody(RequestModel):
    tool: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: Annotated[FreeDict, Field(default_factory=dict)]
    session: SessionText | None = None


class McpServerInfo(TypedDict):
    name: str


class McpServerList(TypedDict):
    servers: list[McpServerInfo]


class McpTool(TypedDict):
    name: str
    description: str
    input_schema: dict[str, Any]


class McpTools(TypedDict):
    session: str
    tools: list[McpTool]


class McpResult(TypedDict):
    session: str
    is_error: bool
    content: list[dict[str, Any]]  # as MCP has it: text, image, audio, resource, resource_link
