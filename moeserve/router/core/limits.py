"""What one server can take: the limits, and the refusal of requests that no waiting would help."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.messages.schema import GenerateRequest, RequestError
from moeserve.router.core.request import INT32_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    """What the configuration and the worker allow; counts of tokens, slots or requests."""

    num_kv_slots: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int

    @property
    def max_running(self) -> int:
        """Requests bound at once. With no more of them than tokens in a step, every decode row fits into
        every step and leaves a token for the prompts under way, one of which may be the only request that
        `admission.safe_grants` lets go on."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def refusal(self, message: GenerateRequest, num_waiting: int) -> RequestError | None:
        """The answer to a request that is not queued: 400 when it can never run, 503 when too many wait."""
        prompt, remainder = divmod(len(message.token_ids), INT32_BYTES)
        wanted = message.sampling.max_tokens
        if prompt == 0 or remainder or wanted < 0:
            return RequestError(
                id=message.id, status=400, message="the prompt needs at least one token, and max_tokens >= 0"
            )
        most, name = min((self.max_model_len, "max_model_len"), (self.num_kv_slots, "the KV pool's size"))
        if prompt + wanted > most:
            text = f"{prompt} prompt tokens and max_tokens {wanted} are more than {most}, {name}"
            return RequestError(id=message.id, status=400, message=text)
        if num_waiting >= self.max_num_queued_reqs:
            text = f"the server is busy: {num_waiting} requests are waiting already; try again later"
            return RequestError(id=message.id, status=503, message=text)
        return None
