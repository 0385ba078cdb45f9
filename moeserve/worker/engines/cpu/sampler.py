"""Sampling on the CPU for a step's batch: from logits and request slots to tokens and logprobs.

The state per request slot is in C++ (`moeserve.kernels.sampling`); a step is one call for the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moeserve.kernels._C import Pool
from moeserve.kernels.sampling.cpu import SamplerState, uniform_at
from moeserve.messages.sampling import SamplingParams, TokenLogprob
from moeserve.sampling.order import order_code
from moeserve.sampling.parameters import settings_of


def bind_arguments(
    params: SamplingParams, vocab_size: int, prompt_ids: NDArray[np.int32], output_ids: NDArray[np.int32]
) -> dict[str, Any]:
    """Returns a request's sampling parameters, and its prompt and output tokens (int32), as keyword arguments of the
    sampling kernels' `bind`, for CPU and GPU."""
    return {
        **settings_of(params),
        "top_k": min(params.top_k, vocab_size),
        "seed": params.seed & 0xFFFF_FFFF_FFFF_FFFF,
        "min_tokens": params.min_tokens,
        "bias_ids": np.fromiter(params.logit_bias.keys(), np.int32),
        "bias_values": np.fromiter(params.logit_bias.values(), np.float32),
        "stop_ids": np.array(params.stop_token_ids, np.int32),
        "prompt": prompt_ids,
        "output": output_ids,
        "order": order_code(params, params.samplers),
        "dry_breakers": np.frombuffer(params.dry_breakers, np.int32),
    }


class Draw(NamedTuple):
    """Describes how a sampler would draw from a row of logits: the tokens that its filters leave, in their order, and
    the point at which their running weight is drawn."""

    token_ids: NDArray[np.int32]  # [n]
    weights: NDArray[np.float32]  # [n], proportional to their probabilities
    point: float  # from 0 up to 1


class CpuSampler:
    """Sampling state of request slots 0..max_num_seqs-1. Written only by the worker's step loop.

    A token's random number depends only on the request's seed and the number of its output tokens: a request that is
    preempted and bound again with its output continues as if uninterrupted.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, pool: Pool | None = None, isa: str | None = None
    ) -> None:
        """pool: the CPU pool that processes rows in parallel; None: one after another. isa: "plain", "avx2",
        "avx_vnni", "avx512_vnni", "avx512_vbmi", "neon_dotprod" or "neon_i8mm" (ValueError if the CPU lacks it); None:
        the best. Neither changes a result."""
        self._state = SamplerState(max_num_seqs, vocab_size, pool, isa)
        self._vocab_size = vocab_size
        # Seed of the draws of each request slot, and tokens of its prompt; None: greedy, or no request.
        self._drawn: list[tuple[int, int] | None] = [None] * max_num_seqs

    def bind(
        self,
        req_slot: int,
        params: SamplingParams,
        prompt_ids: NDArray[np.int32],
        output_ids: NDArray[np.int32],
    ) -> None:
        """Initialises a request slot with the request's parameters and its tokens so far (int32). Raises ValueError for
        a token id out of range, for example in logit_bias."""
        arguments = bind_arguments(params, self._vocab_size, prompt_ids, output_ids)
        self._state.bind(req_slot, **arguments, logprobs=-1 if params.logprobs is None else params.logprobs)
        self._drawn[req_slot] = (arguments["seed"], len(prompt_ids)) if params.temperature else None

    def foretell(self, logits: torch.Tensor, req_slot: int, position: int) -> Draw | None:
        """Returns how `sample` would draw from these logits (float32 [vocab], CPU; another model's) at this position of
        the request's text, prompt included. None for a greedy request, or if no logit counts. Penalties, bias and masks
        are left out, and nothing is recorded."""
        drawn = self._drawn[req_slot]
        if drawn is None or not torch.isfinite(logits.max()):
            return None
        seed, prompt = drawn
        ids, weights = self._state.survivors(logits[None], req_slot)
        return Draw(ids, weights, uniform_at(seed, position - prompt))

    def sample(
        self,
        logits: torch.Tensor,
        req_slots: NDArray[np.int32],
        masks: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None,
    ) -> tuple[NDArray[np.int32], list[TokenLogprob | None]]:
        """Samples one token for each row of `logits` (float32 [rows, vocab], CPU); req_slots[row] is the row's
        request.

        Returns the token ids, and logprobs for the rows whose request asked for them. NOT_FINITE or NONE_ALLOWED
        instead of a token tells why the request cannot continue. Every other token is recorded as its request's
        output. All slots differ.

        `masks`: bit masks of allowed tokens (int32 [any, words]), and each row's index into them (int32 [rows], -1:
        any token).
        """
        token_ids, found = self._state.sample(logits, req_slots, *(masks or ()))
        return token_ids, [None if f is None else _logprob(*f) for f in found]

    def prompt_logprobs(
        self, logits: torch.Tensor, targets: NDArray[np.int32], top_n: int
    ) -> list[TokenLogprob]:
        """Returns the logprob, rank and top tokens of prompt tokens: row i of `logits` (float32 [rows, vocab], CPU)
        predicts targets[i].

        For logits that are not finite: rank 0, logprob NaN, no top tokens. (Sampling then fails as well.)
        """
        found = self._state.logprobs(logits, targets, top_n)
        return [
            TokenLogprob(int(target), math.nan, 0, (), ()) if f is None else _logprob(*f)
            for target, f in zip(targets, found, strict=True)
        ]


def _logprob(
    token_id: int, logprob: float, rank: int, top_ids: Sequence[int], top_logprobs: Sequence[float]
) -> TokenLogprob:
    return TokenLogprob(token_id, logprob, rank, tuple(top_ids), tuple(top_logprobs))
