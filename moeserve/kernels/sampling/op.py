"""Sampling on the GPU: the parameters of request slots on the device, and the launches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.launch import next_power_of_2
from moeserve.kernels.sampling import columns
from moeserve.kernels.sampling.choose import filter_and_draw_kernel
from moeserve.kernels.sampling.dry import dry_kernel
from moeserve.kernels.sampling.dry_record import dry_record
from moeserve.kernels.sampling.logprobs import logprobs_kernel
from moeserve.kernels.sampling.scan import scan_kernel
from moeserve.sampling.parameters import DEFAULTS, PARAMETERS, settings_of

BLOCK = 1024  # logits per block
LEAST_TEMPERATURE = 2.0**-120  # above 0, because kernels divide by it; below 2^-126 that would fail
MAX_BIAS = 1024
MAX_STOP = 512  # a request's own (up to 256) and the model's end tokens; a power of two

_DEFAULTS = settings_of(DEFAULTS)
_PENALTIES = [name for name, of in PARAMETERS.items() if of.sampler == "penalties"]


class SamplingWorkspace:
    """Buffers for sampling up to `rows` rows."""

    def __init__(self, rows: int, vocab: int, device: torch.device | str) -> None:
        blocks = -(-vocab // BLOCK)
        self.edited = torch.empty(rows, vocab, device=device)
        self.block_max = torch.empty(rows, blocks, device=device)
        self.block_sum = torch.empty(rows, blocks, device=device)
        self.values = torch.empty(rows, vocab, device=device)
        self.ids = torch.empty(rows, vocab, dtype=torch.int32, device=device)


class DeviceSamplerState:
    """The state of each request slot between steps, on the device. The host writes it in `bind`; kernels write the
    number of output tokens and the history.

    history [history_rows, vocab]: 2 * (occurrences in the output) + (1 if in the prompt), for slots with penalties.
    """

    def __init__(
        self, max_num_seqs: int, vocab: int, device: torch.device | str, history_rows: int | None = None
    ) -> None:
        self.vocab = vocab
        self.params = torch.zeros(max_num_seqs, columns.WORDS.value, dtype=torch.int32, device=device)
        self.bias_ids = torch.zeros(max_num_seqs, MAX_BIAS, dtype=torch.int32, device=device)
        self.bias_values = torch.zeros(max_num_seqs, MAX_BIAS, device=device)
        self.stop_ids = torch.zeros(max_num_seqs, MAX_STOP, dtype=torch.int32, device=device)
        self.history = torch.zeros(
            max_num_seqs if history_rows is None else history_rows, vocab, dtype=torch.int32, device=device
        )
        # Slots whose logits are edited (not counting bitmasks); and slots with a sampler order or DRY.
        self.edits: set[int] = set()
        self.chains: set[int] = set()
        self._records: dict[int, Tensor] = {}  # slot → DRY record

    def bind(
        self,
        slot: int,
        *,
        seed: int = 0,
        min_tokens: int = 0,
        bias_ids: npt.NDArray[np.int32] | None = None,
        bias_values: npt.NDArray[np.float32] | None = None,
        stop_ids: npt.NDArray[np.int32] | None = None,
        prompt: npt.NDArray[np.int32] | None = None,
        output: npt.NDArray[np.int32] | None = None,
        order: int = 0,
        dry_breakers: npt.NDArray[np.int32] | None = None,
        max_tokens: int = 0,
        **given: float,
    ) -> None:
        """Initialises a request slot with a request's parameters and its tokens so far. bias_ids, stop_ids, prompt,
        output: int32 token ids; bias_values: float32, one for each of bias_ids. order: from `order_code`; dry_breakers
        int32: token sequences, each terminated by -1; max_tokens, of the whole output, bounds DRY's memory. given:
        sampler settings; others keep their defaults. Raises ValueError for ids out of range, or more than MAX_BIAS or
        MAX_STOP."""
        none = np.zeros(0, np.int32)
        bias_ids, stop_ids = none if bias_ids is None else bias_ids, none if stop_ids is None else stop_ids
        prompt, output = none if prompt is None else prompt, none if output is None else output
        for ids in (bias_ids, stop_ids, prompt, output):
            if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab):
                raise ValueError(f"a token id is not in [0, {self.vocab})")
        if len(bias_ids) > MAX_BIAS or len(stop_ids) > MAX_STOP:
            raise ValueError(f"more than {MAX_BIAS} tokens with a bias or {MAX_STOP} stop tokens")
        if unknown := given.keys() - _DEFAULTS.keys():
            raise TypeError(f"there is no setting {min(unknown)}")
        settings = _DEFAULTS | given
        if np.float32(settings["temperature"]):
            settings["temperature"] = max(settings["temperature"], LEAST_TEMPERATURE)
        penalised = any(settings[name] != _DEFAULTS[name] for name in _PENALTIES)
        self._records.pop(slot, None)
        if settings["dry_multiplier"]:
            text = np.concatenate([prompt, output])
            room = len(prompt) + max(max_tokens, len(output)) + 1
            breakers = none if dry_breakers is None else dry_breakers
            record = dry_record(text, room, breakers, self.vocab)
            self._records[slot] = torch.from_numpy(record).to(self.params.device)
        words = columns.row(
            **settings,
            num_bias=len(bias_ids),
            num_stop=len(stop_ids),
            min_tokens=min(min_tokens, 2**31 - 1),
            seed=seed,
            num_output=len(output),
            history_row=slot if penalised else -1,
            order=order,
            dry=self._records[slot].data_ptr() if slot in self._records else 0,
            dry_room=room if slot in self._records else 0,
        )
        _put(self.edits, slot, penalised or len(bias_ids) > 0 or min_tokens > len(output))
        _put(self.chains, slot, order != 0 or slot in self._records)
        self.params[slot].copy_(torch.from_numpy(words))
        if len(bias_ids):
            self.bias_ids[slot, : len(bias_ids)].copy_(torch.from_numpy(bias_ids))
            self.bias_values[slot, : len(bias_ids)].copy_(
                torch.from_numpy(np.asarray(bias_values, np.float32))
            )
        if len(stop_ids):
            self.stop_ids[slot, : len(stop_ids)].copy_(torch.from_numpy(stop_ids))
        if penalised:
            seen = 2 * np.bincount(output, minlength=self.vocab).astype(np.int32)
            seen[prompt] |= 1
            self.history[slot].copy_(torch.from_numpy(seen))

    def note_outputs(self, slots: Tensor, counts: Tensor) -> None:
        """Adds counts int32 [n] to the numbers of output tokens of slots int64 [n], all distinct."""
        self.params[:, columns.NUM_OUTPUT].index_add_(0, slots, counts)


def _put(slots: set[int], slot: int, is_in: bool) -> None:
    if is_in:
        slots.add(slot)
    else:
        slots.discard(slot)


def sample(
    logits: Tensor,
    slots: Tensor,
    count: Tensor,
    params: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    stop_ids: Tensor,
    history: Tensor,
    bitmask: Tensor | None,
    edited: Tensor | None,
    block_max: Tensor,
    block_sum: Tensor,
    values: Tensor,
    ids: Tensor,
    tokens: Tensor,
    *,
    has_chains: bool = False,
    ahead: Tensor | None = None,
) -> None:
    """Writes tokens int32 [n]: one for each row of float32 logits [n, vocab], by its slot's parameters, for i <
    count[0]; -1 if the row held NaN, +inf or only -inf, -2 if the masks leave none. Without `ahead`, slots must be
    distinct, and the tokens are recorded as their output.

    params .. history: a DeviceSamplerState's; edited .. ids: a SamplingWorkspace's. Without `edited`, no logits are
    edited: no slot may have a bias, penalties or masked tokens, and bitmask (int32 [n, vocab / 32 rounded up], bit
    t of word w: token 32 w + t is allowed) must be None. has_chains: some slot has an order of samplers or DRY;
    needs `edited`.

    ahead: int32 [n], the number of earlier tokens of the same slot in this call; a slot may then have several rows.
    Each row is sampled as if it were the only row after these tokens. Then nothing is recorded
    (`DeviceSamplerState.note_outputs` does that), and logits must not be edited.
    """
    n, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    repeats = None
    if has_chains:
        repeats = ids[:n].zero_()  # zero until the scan has read it
        dry_kernel((n,), slots, count, params, repeats, vocab, num_warps=8)
    scan_kernel(
        (n, blocks),
        logits,
        slots,
        count,
        params,
        bias_ids,
        bias_values,
        stop_ids,
        history,
        repeats,
        bitmask,
        edited,
        block_max,
        block_sum,
        vocab,
        BLOCK,
        bias_ids.shape[1],
        stop_ids.shape[1],
        num_warps=4,
    )
    filter_and_draw_kernel(
        (n,),
        logits if edited is None else edited,
        None if edited is None else logits,
        slots,
        count,
        params,
        history,
        ahead,
        block_max,
        block_sum,
        values,
        ids,
        tokens,
        vocab,
        BLOCK,
        blocks,
        next_power_of_2(blocks),
        has_chains,
        num_warps=8,
    )


def logprobs(
    logits: Tensor,
    targets: Tensor,
    count: Tensor,
    block_max: Tensor,
    block_sum: Tensor,
    values: Tensor,
    ids: Tensor,
    target_logprobs: Tensor,
    ranks: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
) -> None:
    """Computes natural log-softmax of raw logits [n, vocab]: at targets int32 [n], with their ranks (1: largest),
    and for the top_ids.shape[1] largest. Rank 0: the row is not finite or the target is no token. block_max .. ids:
    a SamplingWorkspace's."""
    n, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    scan_kernel(
        (n, blocks),
        logits,
        None,
        count,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        block_max,
        block_sum,
        vocab,
        BLOCK,
        0,
        0,
        num_warps=4,
    )
    logprobs_kernel(
        (n,),
        logits,
        targets,
        count,
        block_max,
        block_sum,
        values,
        ids,
        target_logprobs,
        ranks,
        top_ids,
        top_logprobs,
        vocab,
        BLOCK,
        blocks,
        next_power_of_2(blocks),
        top_ids.shape[1],
        num_warps=8,
    )
