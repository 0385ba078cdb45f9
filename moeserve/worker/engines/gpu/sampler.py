"""Sampling on the GPU: from logits and request slots to tokens and logprobs; same results as the CPU's sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.kernels.sampling.op import DeviceSamplerState, SamplingWorkspace, logprobs, sample
from moeserve.messages.sampling import SamplingParams, TokenLogprob
from moeserve.worker.engines.cpu.sampler import bind_arguments
from moeserve.worker.engines.gpu.steps.pinned import pinned_copy

MAX_TOP = 20  # top logprobs per token, at most

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Scores:
    """Natural log probabilities of n rows, on the GPU or in RAM: of the target tokens, with their ranks (1: the
    likeliest), and of the MAX_TOP most likely tokens."""

    targets: Tensor  # int32 [n]
    logprobs: Tensor  # float32 [n]
    ranks: Tensor  # int32 [n]
    top_ids: Tensor  # int32 [n, MAX_TOP]
    top_logprobs: Tensor  # float32 [n, MAX_TOP]

    def on_host(self) -> Scores:
        """Launches the copy to the host. The result is valid once all work launched before it is done."""
        return Scores(*(getattr(self, field.name).to("cpu", non_blocking=True) for field in fields(self)))

    def read(self, wanted: list[int | None]) -> list[TokenLogprob | None]:
        """Waits for the GPU if necessary. Returns one entry for each of the first len(wanted) rows, with wanted[i]
        top tokens; None where wanted[i] is None. For logits that are not finite: rank 0, logprob NaN, no top tokens."""
        targets, ranks = self.targets.tolist(), self.ranks.tolist()
        own, ids, values = self.logprobs.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist()
        found: list[TokenLogprob | None] = []
        for row, top in enumerate(wanted):
            if top is None:
                found.append(None)
            elif ranks[row] == 0:
                found.append(TokenLogprob(targets[row], math.nan, 0, (), ()))
            else:
                tops = tuple(ids[row][:top]), tuple(values[row][:top])
                found.append(TokenLogprob(targets[row], own[row], ranks[row], *tops))
        return found


class GpuSampler:
    """Sampling state of request slots 0..max_num_seqs-1, and buffers for `rows` rows. Written only by the step loop."""

    def __init__(self, max_num_seqs: int, vocab: int, rows: int, device: torch.device) -> None:
        self._vocab = vocab
        self._state = DeviceSamplerState(max_num_seqs, vocab, device)
        self._workspace = SamplingWorkspace(rows, vocab, device)
        self._tokens = torch.empty(rows, dtype=torch.int32, device=device)
        self._masks = torch.empty(rows, -(-vocab // 32), dtype=torch.int32, device=device)
        self._top = min(MAX_TOP, vocab)
        self._logprobs: list[int | None] = [None] * max_num_seqs
        self._noted: list[tuple[Int32s, Int32s]] = []  # outputs that the device does not count yet

    @property
    def tokens(self) -> Tensor:
        """Returns int32 [rows]: the tokens of the last `sample`, once computed."""
        return self._tokens

    def bind(self, slot: int, params: SamplingParams, prompt_ids: Int32s, output_ids: Int32s) -> None:
        """Initialises a request slot. Raises ValueError for a token id out of range."""
        self._count_noted()
        self._logprobs[slot] = params.logprobs
        arguments = bind_arguments(params, self._vocab, prompt_ids, output_ids)
        self._state.bind(slot, **arguments, max_tokens=params.max_tokens)

    def wanted_logprobs(self, slots: Int32s) -> list[int | None]:
        """Returns the number of top tokens that each slot's request asked for; None for requests without logprobs."""
        return [self._logprobs[slot] for slot in slots.tolist()]

    def sample(
        self,
        logits: Tensor,
        slots: Int32s,
        device_slots: Tensor,
        count: Tensor,
        masks: tuple[Int32s, Int32s] | None,
    ) -> Tensor:
        """Launches the choice of a token for each of the first len(slots) rows. Returns int32 [len(logits)], valid
        until the next call. device_slots: slots padded to len(logits); count: int32 [1], their number.

        NOT_FINITE or NONE_ALLOWED instead of a token means that its request cannot continue; other tokens are
        recorded as output. masks: bit masks of allowed tokens (int32 [any, words]) and each row's index into them
        (-1: any token).
        """
        self._count_noted()
        state, workspace, n = self._state, self._workspace, len(logits)
        bitmask = None if masks is None else self._mask_rows(masks, n)
        has_chains = _any_of(slots, state.chains)
        is_edited = has_chains or bitmask is not None or _any_of(slots, state.edits)
        tokens = self._tokens[:n]
        sample(
            logits, device_slots, count, state.params, state.bias_ids, state.bias_values, state.stop_ids,
            state.history, bitmask, workspace.edited if is_edited else None, workspace.block_max,
            workspace.block_sum, workspace.values, workspace.ids, tokens, has_chains=has_chains,
        )  # fmt: skip
        return tokens

    def depends_on_outputs(self, slots: Int32s) -> bool:
        """Returns whether the next token of one of these slots may depend on its earlier tokens, not only on logits
        and index."""
        return _any_of(slots, self._state.chains) or _any_of(slots, self._state.edits)

    def sample_ahead(self, logits: Tensor, device_slots: Tensor, count: Tensor, ahead: Tensor) -> Tensor:
        """Launches the choice of a token for each row; several rows may have the same request slot. Returns int32
        [len(logits)], on the GPU, as `sample` does. device_slots, count: as for `sample`. ahead: int32 [len(logits)],
        rows of the same slot before each. Records no output; no slot may be one that `depends_on_outputs`."""
        self._count_noted()
        state, w, tokens = self._state, self._workspace, self._tokens[: len(logits)]
        sample(
            logits, device_slots, count, state.params, state.bias_ids, state.bias_values, state.stop_ids, state.history,
            None, None, w.block_max, w.block_sum, w.values, w.ids, tokens, ahead=ahead,
        )  # fmt: skip
        return tokens

    def note_outputs(self, slots: Int32s, counts: Int32s) -> None:
        """Records counts[i] tokens as output of slots[i], all distinct, after `sample_ahead`. Launches nothing: the
        next sampling does, when no GPU waits for the host."""
        self._noted.append((slots, counts))

    def _count_noted(self) -> None:
        for noted in self._noted:
            slots, counts = pinned_copy(np.stack(noted), self._tokens.device)
            self._state.note_outputs(slots.long(), counts)
        self._noted.clear()

    def launch_all_kernels(self, logits: Tensor, slots: Tensor, count: Tensor) -> None:
        """Launches all kernels that sampling len(logits) rows may need, so that they are compiled. Called inside
        `compile_ahead`. logits: float32 [rows, vocab]; slots: int32 [rows]; count: int32 [1]."""
        self.sample_ahead(logits, slots, count, slots)
        state, w, n = self._state, self._workspace, len(logits)
        masks = self._masks[:n]
        for edited, bitmask, has_chains in (
            *((None, None, False), (w.edited, None, False), (w.edited, masks, False)),
            *((w.edited, None, True), (w.edited, masks, True)),
        ):
            sample(
                logits, slots, count, state.params, state.bias_ids, state.bias_values, state.stop_ids, state.history,
                bitmask, edited, w.block_max, w.block_sum, w.values, w.ids, self._tokens[:n], has_chains=has_chains,
            )  # fmt: skip
        self.score(logits, self._tokens[:n], count)

    def score(self, logits: Tensor, targets: Tensor, count: Tensor) -> Scores:
        """Launches the computation of the targets' natural log probabilities and returns the buffers for them. targets:
        int32 [len(logits)], of which count[0] are valid."""
        n, workspace, device = len(logits), self._workspace, logits.device
        scores = Scores(
            targets,
            torch.empty(n, device=device),
            torch.empty(n, dtype=torch.int32, device=device),
            torch.empty(n, self._top, dtype=torch.int32, device=device),
            torch.empty(n, self._top, device=device),
        )
        logprobs(
            logits, targets, count, workspace.block_max, workspace.block_sum, workspace.values, workspace.ids,
            scores.logprobs,
            scores.ranks, scores.top_ids, scores.top_logprobs,
        )  # fmt: skip
        return scores

    def _mask_rows(self, masks: tuple[Int32s, Int32s], n: int) -> Tensor:
        """Returns int32 [n, words], the mask of each row, all ones for rows without one. Tokens beyond a mask's last
        word (of a padded vocabulary) are not allowed."""
        bits, index = masks
        rows = np.full((n, self._masks.shape[1]), -1, np.int32)
        constrained = np.flatnonzero(index >= 0)
        rows[constrained] = 0
        words = min(bits.shape[1], rows.shape[1])
        rows[constrained, :words] = bits[index[constrained], :words]
        return self._masks[:n].copy_(torch.from_numpy(rows))


def _any_of(slots: Int32s, chosen: set[int]) -> bool:
    return bool(chosen) and not chosen.isdisjoint(slots.tolist())
