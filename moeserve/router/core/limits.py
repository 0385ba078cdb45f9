"""The limits of one server, and the refusal of requests that can never run within them."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.messages.pages import Tier
from moeserve.messages.prompt_embeddings import fault_of
from moeserve.messages.refusal import Refusal
from moeserve.messages.schema import GenerateRequest, RequestError
from moeserve.router.core.memory.snapshot_points import DEFAULT_SPACING, SnapshotSpacing
from moeserve.router.core.request import INT32_BYTES

DEFAULT_PREFILL_SHARE = 0.4
# Prefill share for prompts that stream experts in RAM to a GPU: an answer keeps half of its speed, and a prompt takes
# twice its time.
STREAMED_PREFILL_SHARE = 0.5
PROMPTS_FIRST = 1.0  # the share with which every step takes as many prompt tokens as it has room for


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that the configuration and the worker set: numbers of tokens, slots or requests."""

    num_kv_slots: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int = 1 << 20
    max_itl_ms: float | None = None  # limit on inter-token latency; None: none (`pace.py`).
    # The share of the time that prompts get while other requests decode (`pace.py`).
    prefill_share: float = DEFAULT_PREFILL_SHARE
    streams_prompts: bool = False  # chunks of prompts stream experts from RAM to a GPU (`pace.py`)
    reuse_prefixes: bool = True
    isolate_tenants: bool = False  # API keys do not share cached prefixes
    num_experts: int = 0  # of a layer; 0: a dense model
    experts_per_token: int = 0
    num_state_slots: int = 0  # of recurrent state; 0: the model has none
    num_window_slots: int = 0  # of the windowed layers' own KV pool; 0: all layers have one pool
    window: int = 0  # tokens that such a layer attends to
    page_tokens: int = 0  # of a page of KV in a tier; 0: there are no tiers
    page_bytes: int = 1
    page_write_bytes: int = 8 << 20  # copied out before a step whose decode rows would wait for more
    tiers: tuple[Tier, ...] = ("disk",)  # where there are pages
    state_bytes: int = 0  # of a slot of recurrent state
    snapshot_spacing: SnapshotSpacing = DEFAULT_SPACING  # of snapshots of recurrent state within a prompt
    event_block_size: int | None = None  # tokens of a block in KV events; None: there are no KV events
    max_drafts: int = 0  # drafted positions of a decode row; 0: there are no drafts
    embedding_bytes: int = 0  # of an embedding that stands for a token; 0: the worker takes none
    rotates_in_sections: bool = False  # embeddings may have positions of their own
    whole_spans: bool = False  # no chunk ends within a span of embeddings

    @property
    def max_running(self) -> int:
        """The most requests bound at once. There are no more of them than tokens in a step, so that a step has a token
        for each: a decode row for every decoding request, and one for every prompt. Nor are there more than state
        slots, so that a request that may be bound has one."""
        most = min(self.max_num_seqs, self.max_num_batched_tokens)
        return min(most, self.num_state_slots) if self.num_state_slots else most

    def refusal(self, message: GenerateRequest) -> RequestError | None:
        """The 400 for a request that can never run; None if it can."""
        prompt, remainder = divmod(len(message.token_ids), INT32_BYTES)
        wanted = message.sampling.max_tokens
        if prompt == 0 or remainder or wanted < 0:
            return RequestError(
                id=message.id, status=400, message="the prompt needs at least one token, and max_tokens >= 0"
            )
        most, name = min((self.max_model_len, "max_model_len"), (self.num_kv_slots, "the KV pool's size"))
        if prompt + wanted > most:
            text = f"{prompt} prompt tokens and max_tokens {wanted} are more than {most}, {name}"
            return RequestError(message.id, 400, text, refusal=Refusal.TOO_LONG)
        if message.spans and (fault := self._fault_of_spans(message, prompt)) is not None:
            return RequestError(message.id, 400, fault)
        return None if message.beams is None else self._refusal_of_beams(message, prompt, message.beams.width)

    def _fault_of_spans(self, message: GenerateRequest, prompt: int) -> str | None:
        if not self.embedding_bytes:
            return (
                "the prompt has embeddings (a picture, say) in place of tokens, which only the CPU engine on the "
                "server's own machine computes so far"
            )
        if message.beams is not None:
            return "a beam search cannot have embeddings in its prompt"
        if message.sampling.prompt_logprobs is not None:
            return "prompt logprobs are of tokens: a prompt with embeddings has none"
        if not self.rotates_in_sections and any(span.positions for span in message.spans):
            return "embeddings have positions of their own, in sections by which this model does not rotate"
        longest = max(span.count for span in message.spans)
        if self.whole_spans and longest > self.max_num_batched_tokens:
            return (
                f"a picture of {longest} tokens is more than a step's {self.max_num_batched_tokens}, and this model "
                "reads a picture as a whole: send a smaller one, or raise --max-num-batched-tokens"
            )
        return fault_of(message.spans, prompt, self.embedding_bytes, self.max_model_len)

    def _refusal_of_beams(self, message: GenerateRequest, prompt: int, width: int) -> RequestError | None:
        text = None
        if width > self.max_running:
            text = (
                f"{width} beams are more than the {self.max_running} sequences that this server runs at once"
            )
        elif (needed := prompt + width * message.sampling.max_tokens) > self.num_kv_slots:
            text = (
                f"{prompt} prompt tokens and {width} beams of max_tokens {message.sampling.max_tokens} may need "
                f"{needed} KV slots; this server has {self.num_kv_slots}: lower max_tokens or beam_width"
            )
        return None if text is None else RequestError(message.id, 400, text, refusal=Refusal.TOO_LONG)
