"""moeserve's own endpoints: tokenisation, loading of adapters, expert usage, and the server's status. Their errors have
the default shape."""

from moeserve.httpserver.native import adapters, experts, probes, status, tokenize
from moeserve.httpserver.native.bodies import (
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from moeserve.httpserver.transport.api_table import Api

_PROBES = frozenset({"/health", "/health/live", "/health/ready"})
_OPEN = _PROBES | {"/metrics"}  # load balancers and scrapers have no key

API = Api(
    name="native",
    routers=(tokenize.router, adapters.router, experts.router, probes.router, status.router),
    bodies=(TokenizeRequest, DetokenizeRequest, LoadAdapterRequest, UnloadAdapterRequest),
    open_paths=_OPEN,
    quiet_paths=_OPEN | {"/v1/experts"},  # our own pages poll it
    probe_paths=_PROBES,
)

# Paths that are answered at --health-port.
PROBES = Api(name="probes", routers=(probes.router,), quiet_paths=_OPEN, probe_paths=_PROBES)
