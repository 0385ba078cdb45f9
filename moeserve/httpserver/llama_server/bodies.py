"""The request body of /completion, with llama-server's names.

Source: llama-server's README and `server-task.cpp`, of 2026. Defaults are the server's own, as in the other APIs.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.request.asked import Asked, FimFile, FimPrompt, GrammarConstraint
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.request.fields import (
    INT32_MAX,
    INT64_MAX,
    MAX_TOP_LOGPROBS,
    ManyStopStrings,
    ModelName,
    TokenId,
)
from moeserve.httpserver.generation.request.grammar_fields import Grammar, Schema
from moeserve.httpserver.generation.request.pictures import (
    MEDIA_MARKER,
    PicturedText,
    at_markers,
    picture_of_base64,
)
from moeserve.httpserver.generation.request.sampler_fields import SAMPLER_LISTS, SamplerFields
from moeserve.httpserver.generation.request.sampling_fields import LlamaServerSampling
from moeserve.httpserver.transport.request_model import NO_EFFECT, RequestModel, UnsupportedField
from moeserve.messages.pictures import MOST_PICTURES

_OFF: Final = UnsupportedField((False,))
MAX_EXTRA_FILES: Final = 1024
MAX_INFILLS: Final = 16  # answers of one request


def _no_grammar(value: Any) -> Any:
    return None if value == "" else value


class MultimodalPrompt(RequestModel):
    prompt_string: str
    multimodal_data: Annotated[list[str], Field(max_length=MOST_PICTURES, default_factory=list)]

    @model_validator(mode="after")
    def _has_its_pictures(self) -> MultimodalPrompt:
        _ = self.plain  # refuses bytes that are no base64, and markers without a picture
        return self

    @cached_property
    def plain(self) -> str | PicturedText:
        if not self.multimodal_data:
            return self.prompt_string
        return at_markers(self.prompt_string, [picture_of_base64(each) for each in self.multimodal_data])


def _one_prompt(prompt: Any) -> Any:
    """Refuses what neither is a prompt of this API nor would get a useful message from the models of prompts."""
    if isinstance(prompt, dict | MultimodalPrompt | str):
        return prompt
    if not isinstance(prompt, list) or any(type(one) is not int for one in prompt):
        message = (
            "must be one text, the token ids of one, or an object with prompt_string; send several prompts to "
            "/v1/completions"
        )
        raise PydanticCustomError("prompt", "{message}", {"message": message})
    return prompt


def _kind_of_prompt(prompt: Any) -> str:
    return "multimodal" if isinstance(prompt, dict | MultimodalPrompt) else "plain"


class CompletionBody(LlamaServerSampling, SamplerFields):
    takes_whole_floats: ClassVar = True
    empty: ClassVar = SAMPLER_LISTS | {"stop", "logit_bias", "response_fields"}
    # Fields without effect here: about cache and slots, and details of samplers that are off.
    idle: ClassVar = frozenset(
        {
            *("cache_prompt", "id_slot", "n_cache_reuse", "n_keep", "n_discard", "sse_ping_interval"),
            *("dynatemp_exponent", "mirostat_eta", "mirostat_tau", "penalize_nl", "penalty_prompt"),
            *("adaptive_decay", "backend_sampling", "slot_id", "reasoning_format", "chat_format"),
            *("speculative.n_max", "speculative.n_min", "speculative.p_min", "t_max_prompt_ms"),
        }
    )
    unsupported_fields: ClassVar = {
        "adaptive_target": UnsupportedField((-1,)),
        "dynatemp_range": UnsupportedField((0,)),
        "image_data": UnsupportedField(),
        "lora": UnsupportedField(),
        "min_keep": UnsupportedField((0,)),
        "mirostat": UnsupportedField((0,)),
        "n_cmpl": UnsupportedField((1,)),
        "post_sampling_probs": _OFF,
        "tfs_z": UnsupportedField((1,)),
    }

    model: ModelName | None = None
    prompt: Annotated[
        Annotated[str | list[TokenId], Tag("plain")] | Annotated[MultimodalPrompt, Tag("multimodal")],
        Discriminator(_kind_of_prompt),
        BeforeValidator(_one_prompt),
        Field(
            description="A text or its token ids, as it is: no chat template; or a text with pictures: "
            f"`prompt_string` with a marker {MEDIA_MARKER} for each picture in base64 in `multimodal_data`."
        ),
    ]
    n_predict: Annotated[
        int,
        Field(
            ge=-2,
            le=INT32_MAX,
            description="-1, -2 or more than fits: the rest of the context. 0: only computes the prompt.",
        ),
    ] = -1
    stream: bool = False
    stop: Annotated[ManyStopStrings, Field(default_factory=list)]

    repeat_last_n: Annotated[Any, NO_EFFECT] = None
    seed: Annotated[
        int, Field(ge=-INT64_MAX - 1, le=INT64_MAX, description="-1: another one each time.")
    ] = -1
    ignore_eos: bool = False

    grammar: Annotated[Grammar | None, BeforeValidator(_no_grammar)] = None
    json_schema: Schema | None = None

    n_probs: Annotated[
        int,
        Field(
            ge=0,
            le=MAX_TOP_LOGPROBS,
            description="`completion_probabilities` has the log-probabilities of each token and of this many most "
            "likely ones.",
        ),
    ] = 0
    timings_per_token: Annotated[bool, Field(description="Each chunk of a stream has `timings`.")] = False
    return_tokens: Annotated[bool, Field(description="`tokens` has the ids of the answer.")] = False
    return_progress: Annotated[
        bool, Field(description="Sends chunks with `prompt_progress` while the prompt is computed.")
    ] = False

    n_indent: Annotated[
        int, Field(ge=0, le=1024, description="The answer ends before a line that begins with fewer blanks.")
    ] = 0
    t_max_predict_ms: Annotated[
        int,
        Field(
            ge=-1,
            le=INT32_MAX,
            description="Above 0: the answer ends at the first line end this many milliseconds after its first token.",
        ),
    ] = 0
    response_fields: Annotated[
        list[Annotated[str, Field(max_length=200)]],
        Field(
            max_length=64,
            default_factory=list,
            description="The only fields of the answer; `a/b` is the field b of the object a.",
        ),
    ]

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionBody:
        if self.grammar is not None and self.json_schema is not None:
            raise PydanticCustomError("json_schema", "only one of grammar and json_schema is allowed")
        return self

    @property
    def num_answers(self) -> int:
        return 1

    def plain_prompt(self) -> str | list[int] | FimPrompt | PicturedText:
        return self.prompt.plain if isinstance(self.prompt, MultimodalPrompt) else self.prompt

    def asked(self, caller: Caller) -> Asked:
        """Translates the body to the engine's request."""
        return Asked(
            caller=caller,
            model=self.model,
            prompt=[self.plain_prompt()],
            n=self.num_answers,
            max_tokens=None if self.n_predict < 0 else self.n_predict,
            max_tokens_param="n_predict",
            ends_with_context=True,
            grammar=self._grammar_constraint(),
            sampler=self.sampler_settings(),
            samplers=self.samplers,
            dry_sequence_breakers=tuple(self.dry_sequence_breakers),
            logprobs=self.n_probs or None,
            seed=None if self.seed == -1 else self.seed,
            stop=tuple(self.stop),
            ignore_eos=self.ignore_eos,
            progress=self.return_progress and self.stream,
            chosen=self.chosen_settings(),
        )

    def _grammar_constraint(self) -> GrammarConstraint | None:
        if self.grammar is not None:
            return GrammarConstraint(grammar.Ebnf(self.grammar), "grammar")
        if self.json_schema is not None:
            return GrammarConstraint(grammar.JsonSchema(self.json_schema), "json_schema", is_lenient=True)
        return None


class ExtraFile(RequestModel):
    filename: Annotated[str, Field(max_length=4096)] = "tmp"
    text: str = ""


class InfillBody(CompletionBody):
    unsupported_fields: ClassVar = {
        name: value for name, value in CompletionBody.unsupported_fields.items() if name != "n_cmpl"
    }
    empty: ClassVar = CompletionBody.empty | {"input_extra"}

    prompt: Annotated[str, Field(description="The beginning of the middle.")] = ""
    input_prefix: Annotated[str, Field(description="The text before the middle.")] = ""
    input_suffix: Annotated[str, Field(description="The text after the middle.")] = ""
    input_extra: Annotated[
        list[ExtraFile],
        Field(
            max_length=MAX_EXTRA_FILES,
            default_factory=list,
            description="Files for context. If the prompt is too long, the first files are left out first.",
        ),
    ]
    n_cmpl: Annotated[
        int, Field(ge=1, le=MAX_INFILLS, description="Above 1 the answer is a list; not with stream.")
    ] = 1

    @model_validator(mode="after")
    def _streams_one(self) -> InfillBody:
        if self.stream and self.n_cmpl > 1:
            raise PydanticCustomError("n_cmpl", "above 1 cannot be streamed; set stream to false")
        return self

    @property
    def num_answers(self) -> int:
        return self.n_cmpl

    def plain_prompt(self) -> FimPrompt:
        files = [FimFile(file.filename, file.text) for file in self.input_extra]
        return FimPrompt(
            self.input_prefix,
            self.input_suffix,
            is_cut_to_fit=True,
            files=files,
            begun=self.prompt,
            param="input_suffix",
        )
