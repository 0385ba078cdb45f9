"""/v1/mcp: lists and calls the tools of the MCP servers that the operator has named."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.mcp.bodies import (
    CallToolBody,
    ListToolsBody,
    McpResult,
    McpServerList,
    McpTools,
)
from moeserve.httpserver.mcp.servers import McpServers
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.request_state import state_of
from moeserve.httpserver.transport.sse import JsonResponse, answer

router = APIRouter(tags=["MCP"], route_class=DocumentedRoute)


@router.get("/v1/mcp/servers", responses={200: {"model": McpServerList}})
async def list_servers(request: Request) -> Response:
    """The MCP servers that may be used, by the names of --mcp-servers."""
    found: McpServerList = {"servers": [{"name": name} for name in _servers(request).urls]}
    return JsonResponse(found)


@router.post(
    "/v1/mcp/servers/{name}/tools",
    openapi_extra=documented(ListToolsBody, {}),
    responses={200: {"model": McpTools}},
)
async def list_tools(request: Request, name: str) -> Response:
    """The tools of an MCP server, in a new session with it or the given one."""
    body = await read_body(request, ListToolsBody)
    state_of(request.scope).admit()
    return await answer(request, _tools(_servers(request), name, body))


@router.post(
    "/v1/mcp/servers/{name}/call",
    openapi_extra=documented(CallToolBody, {"tool": "name", "arguments": {}}),
    responses={200: {"model": McpResult}},
)
async def call_tool(request: Request, name: str) -> Response:
    """Calls a tool of an MCP server. A session that the server does not know any more is replaced."""
    body = await read_body(request, CallToolBody)
    state_of(request.scope).admit()
    return await answer(request, _called(_servers(request), name, body))


def _servers(request: Request) -> McpServers:
    servers: McpServers = request.app.state.mcp
    return servers


async def _tools(servers: McpServers, name: str, body: ListToolsBody) -> McpTools:
    with servers.request_to(name) as address:
        from moeserve.httpserver.mcp.client import (
            McpClient,  # aiohttp is only imported where there are servers
        )

        async with McpClient(name, address, body.session) as client:
            tools = await client.tools()
            return {"session": client.session, "tools": tools}


async def _called(servers: McpServers, name: str, body: CallToolBody) -> McpResult:
    with servers.request_to(name) as address:
        from moeserve.httpserver.mcp.client import McpClient

        async with McpClient(name, address, body.session) as client:
            return await client.call(body.tool, body.arguments)
