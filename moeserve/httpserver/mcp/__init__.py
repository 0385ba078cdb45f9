"""Tools of MCP servers, for the chat page. The server calls tools only at the addresses of --mcp-servers.

servers.py   the servers that the operator has named
client.py    the protocol: Model Context Protocol, streamable HTTP
routes.py    the endpoints
"""

from moeserve.httpserver.mcp import routes
from moeserve.httpserver.mcp.bodies import CallToolBody, ListToolsBody
from moeserve.httpserver.transport.api_table import Api

API = Api(name="mcp", routers=(routes.router,), bodies=(ListToolsBody, CallToolBody))
