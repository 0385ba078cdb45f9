"""The answers of moeserve's own endpoints, as typed dicts. (/health answers `engine_state.Health`.)"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12


class Architecture(TypedDict):
    input_modalities: list[str]
    output_modalities: list[str]


class ModelCard(TypedDict):
    """A model in the list of models. Several APIs use this path, so it has the fields of OpenAI, vLLM and Anthropic,
    `context_length` for OpenRouter and LM Studio, and OpenRouter's modalities."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None  # the base model of a LoRA adapter
    max_model_len: int | None
    context_length: int | None  # equal to max_model_len
    type: Literal["model"]
    display_name: str
    created_at: str  # RFC 3339
    max_input_tokens: int | None
    architecture: Architecture


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Version(TypedDict):
    version: str


class TokenizerInfo(TypedDict):
    """The part of vLLM's answer that lm-eval's remote tokenizer reads."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    add_bos_token: bool
    chat_template: str | None
    model_max_length: int
    vocab_size: int


class Load(TypedDict):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_waiting_tokens: int
    num_used_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    utilization: float
    cache_hit_rate: float


class TotalLoad(TypedDict):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_utilization: float


class Loads(TypedDict):
    """SGLang's load report. There is one rank, so totals and the rank's figures are equal."""

    timestamp: str  # ISO 8601
    version: str
    engine: NotRequired[str]  # what computes, once it is ready: "cpu (avx512_vnni, 2 threads)"
    dp_rank_count: int
    loads: list[Load]
    aggregate: TotalLoad


class ExpertCacheTotals(TypedDict):
    """Totals of all steps since the start; a step counts each expert of a layer once."""

    hits: int  # experts that a step used and found in GPU memory
    misses: int  # experts that a step used and did not find in GPU memory
    promotions: int  # experts copied to GPU memory
    bytes: int  # bytes of the promoted experts' weights


class ExpertDiskTotals(TypedDict):
    """Totals of all steps since the start, of experts that were not in GPU memory; a step counts each expert of a layer
    once."""

    hits: int  # experts that a step used and found in RAM
    misses: int  # experts that a step used and had to wait for, as they were on disk
    bytes: int  # read from disk


class Experts(TypedDict):
    object: Literal["experts"]
    model: str
    layers: int
    experts: int  # of a layer
    experts_per_token: int
    counts: list[list[int]]  # [layers][experts]: tokens routed to each since the start
    gpu_experts: list[list[int]]  # ids of each layer's experts in GPU memory now, ascending
    # [layers][experts]: the GPU that has the expert, counted from 0 in --gpus' order; -1: in RAM.
    expert_gpus: list[list[int]]
    disk_experts: list[list[int]]  # ids of each layer's experts that are on disk alone now, ascending
    expert_cache: ExpertCacheTotals | None  # null if the experts' placement is fixed
    expert_disk: ExpertDiskTotals | None  # null if RAM and GPUs hold all experts


class ExpertsHeat(TypedDict):
    """The file that --expert-heat reads, described in docs/reference/placement-files.md."""

    format: Literal["moeserve-expert-heat"]
    version: Literal[1]
    model: str
    layers: int
    experts: int
    experts_per_token: int
    counts: list[list[int]]
