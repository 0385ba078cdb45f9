"""The web pages: chat, and the heat map of the experts. Plain HTML, CSS and JavaScript, which use the public API."""

from moeserve.httpserver.transport.api_table import Api
from moeserve.httpserver.web import pages

API = Api(name="web", routers=(pages.router,), open_paths=pages.PATHS, quiet_paths=pages.PATHS)
