"""The limits of one server, and the check for requests that can never run within them."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.messages.pages import Tier
from moeserve.messages.prompt_embeddings import fault_of
from moeserve.messages.refusal import Refusal
from moeserve.messages.schema import GenerateRequest, RequestError
from moeserve.messages.slot_kinds import SlotKind
from moeserve.router.core.memory.snapshot_points import DEFAULT_SPACING, SnapshotSpacing
from moeserve.router.core.request import INT32_BYTES

DEFAULT_PREFILL_SHARE = 0.4
# Prefill share for prompts that stream RAM experts to a GPU: answers keep half their speed, prompts take twice as long.
STREAMED_PREFILL_SHARE = 0.5
BESIDE_ANSWERS = 8192  # tokens of a step with decode rows, unless --max-num-batched-tokens is given
PROMPTS_FIRST = 1.0  # the prefill share at which each step takes as many prompt tokens as fit


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that the configuration and the worker set, in tokens, slots or requests."""

    num_kv_slots: int  # tokens that the KV pool holds
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int = 1 << 20
    max_itl_ms: float | None = None  # limit of inter-token latency in ms; None: no limit (`pace.py`)
    # Share of the time that prompts get while other requests decode (`pace.py`).
    prefill_share: float = DEFAULT_PREFILL_SHARE
    streams_prompts: bool = False  # prompt chunks stream experts from RAM to a GPU (`pace.py`)
    reuse_prefixes: bool = True
    isolate_tenants: bool = False  # requests of different API keys share no cached prefixes
    num_experts: int = 0  # per layer; 0: a dense model
    experts_per_token: int = 0
    num_state_slots: int = 0  # slots of recurrent state; 0: the model has none
    num_window_slots: int = 0  # slots of the windowed layers' own KV pool; 0: all layers share one pool
    window: int = 0  # tokens that a windowed layer attends to
    slot_kinds: tuple[SlotKind, ...] = ()  # of the KV pool; empty: all slots are alike
    page_tokens: int = 0  # tokens per page of the tiers; 0: there are no tiers
    page_bytes: int = 1
    # bytes that may be copied out before a step with decode rows, which wait for it
    page_write_bytes: int = 8 << 20
    tiers: tuple[Tier, ...] = ("disk",)  # used if page_tokens is not 0
    state_bytes: int = 0  # bytes of one slot of recurrent state
    snapshot_spacing: SnapshotSpacing = DEFAULT_SPACING  # distances between snapshots within a prompt
    event_block_size: int | None = None  # tokens per block of KV events; None: KV events are off
    max_drafts: int = 0  # drafts per decode row; 0: none
    embedding_bytes: int = 0  # bytes of one embedding vector; 0: the worker accepts no embeddings
    rotates_in_sections: bool = False  # embeddings may carry their own positions (multi-section RoPE)
    whole_spans: bool = False  # no chunk ends within a span of embeddings
    # tokens of a step with decode rows; None: as of one without
    most_beside_answers: int | None = None

    def step_tokens(self, num_decode: int) -> int:
        """Returns the tokens that a step with `num_decode` decode rows may have."""
        if num_decode and self.most_beside_answers is not None:
            return self.most_beside_answers
        return self.max_num_batched_tokens

    @property
    def max_running(self) -> int:
        """Maximum number of requests that are bound at once. It is at most the tokens of a step, because each request
        needs a row, and at most the number of state slots, because each request needs one."""
        most = min(self.max_num_seqs, self.step_tokens(1))
        return min(most, self.num_state_slots) if self.num_state_slots else most

    def refusal(self, message: GenerateRequest) -> RequestError | None:
        """Returns the error, with status 400, for a request that can never run; None if it can."""
        prompt, remainder = divmod(len(message.token_ids), INT32_BYTES)
        wanted = message.sampling.max_tokens
        if prompt == 0 or remainder or wanted < 0:
            return RequestError(
                id=message.id,
                status=400,
                message="the prompt must have at least one token, and max_tokens must be 0 or more",
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
                "the prompt has embeddings (a picture, say) in place of tokens, which neither several GPUs nor "
                "a remote worker compute so far"
            )
        if message.beams is not None:
            return "a beam search cannot have embeddings in its prompt"
        if message.sampling.prompt_logprobs is not None:
            return "prompt logprobs are of tokens: a prompt with embeddings has none"
        if not self.rotates_in_sections and any(span.positions for span in message.spans):
            return "embeddings have positions of their own, in sections by which this model does not rotate"
        longest = max(span.count for span in message.spans)
        if self.whole_spans and longest > self.step_tokens(1):
            return (
                f"a picture of {longest} tokens is more than a step's {self.step_tokens(1)}, and this model "
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
