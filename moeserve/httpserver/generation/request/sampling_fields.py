"""The sampling parameters' fields in the APIs' bodies, generated from `sampling/parameters.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, create_model

from moeserve.httpserver.transport.request_model import RequestModel
from moeserve.sampling.parameters import DEFAULTS, PARAMETERS, TYPES, Api, Parameter, SamplerSettings


class SamplingFields(RequestModel):
    """A body, or a part of a body, with the API's sampling parameters under the API's names."""

    sampling_api: ClassVar[Api]

    def sampler_settings(self) -> SamplerSettings:
        """Returns the sampler settings; parameters that the API lacks have their defaults."""
        found: dict[str, Any] = {}
        for name, parameter in declared_for(self.sampling_api).items():
            found[name] = parameter.bounded(getattr(self, parameter.name_in(self.sampling_api, name)))
        return SamplerSettings(**found)

    def chosen_settings(self) -> frozenset[str]:
        """Returns the declared names of the parameters that the request itself has set."""
        names = declared_for(self.sampling_api).items()
        return frozenset(
            name for name, of in names if of.name_in(self.sampling_api, name) in self.model_fields_set
        )


def declared_for(api: Api) -> dict[str, Parameter]:
    """The parameters that the API has, by their declared names."""
    return {name: parameter for name, parameter in PARAMETERS.items() if api in parameter.apis}


def _fields_of(api: Api) -> type[SamplingFields]:
    fields: Any = {
        parameter.name_in(api, name): (
            _annotation(api, name, parameter),
            parameter.defaults.get(api, getattr(DEFAULTS, name)),
        )
        for name, parameter in declared_for(api).items()
    }
    model = create_model("SamplingFields", __base__=SamplingFields, **fields)
    model.sampling_api = api
    return model


def _annotation(api: Api, name: str, parameter: Parameter) -> Any:
    low, high, without_low = parameter.range_in(api)
    kind = TYPES[name]
    bounds: dict[str, Any] = {"gt" if without_low else "ge": low, "le": high}
    return Annotated[kind, Field(**bounds, description=parameter.notes.get(api, parameter.help))]


if TYPE_CHECKING:
    OpenAISampling = SamplingFields
    ResponsesSampling = SamplingFields
    AnthropicSampling = SamplingFields
    LightLLMSampling = SamplingFields
    LlamaServerSampling = SamplingFields
    OllamaSampling = SamplingFields
else:
    OpenAISampling = _fields_of("openai")
    ResponsesSampling = _fields_of("responses")
    AnthropicSampling = _fields_of("anthropic")
    LightLLMSampling = _fields_of("lightllm")
    LlamaServerSampling = _fields_of("llama_server")
    OllamaSampling = _fields_of("ollama")
