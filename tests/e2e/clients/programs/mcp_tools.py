"""A server of the MCP project's own library, on a free port that it prints: `python mcp_tools.py`."""

import socket

import uvicorn
from mcp.server import MCPServer

server = MCPServer("tools")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("out of paper")


listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="warning")).run(sockets=[listener])
