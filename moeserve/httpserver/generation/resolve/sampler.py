"""A request's sampling parameters. Parameters that the request does not set get the server's defaults."""

from __future__ import annotations

from msgspec.structs import replace

from moeserve.httpserver.generation.request.asked import Asked
from moeserve.httpserver.generation.request.sampling_defaults import SamplingDefaults
from moeserve.sampling.parameters import SamplerSettings


def with_defaults(asked: Asked, defaults: SamplingDefaults) -> tuple[SamplerSettings, int | None]:
    """Returns the sampling parameters, and the limit of the answer's tokens for a request whose client and API set
    none."""
    if asked.chosen is None:
        return asked.sampler, asked.default_max_tokens
    settings = {name: value for name, value in defaults.settings.items() if name not in asked.chosen}
    bound = defaults.max_tokens if asked.default_max_tokens is None else asked.default_max_tokens
    return replace(asked.sampler, **settings), bound
