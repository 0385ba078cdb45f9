"""The C++ sampler: about 10 us for a greedy or top-k row of 151,936 logits, 100 us if every logit counts.

`SamplerState(max_num_seqs, vocab, pool=None, isa=None)` keeps what each request slot needs between steps: its
parameters, the counts for its penalties, its number of output tokens. Calls take whole batches:

- `bind(slot, *, seed, ..., order, dry_breakers, **settings)` overwrites a slot. Raises ValueError for bad ids.
  `settings` has the fields of moeserve/sampling/parameters.py, `order` comes from `moeserve.sampling.order.order_code`,
  `dry_breakers` int32: token sequences, each terminated by -1.
- `sample(logits, slots, masks=None, mask_of=None)`: float32 logits [rows, vocab], int32 slots [rows], all distinct.
  If mask_of[i] (int32 [rows]) is not negative, row i may only sample tokens whose bit is set in masks[mask_of[i]]
  (int32 [any, words], lowest bit first; tokens beyond the last word are excluded). Returns int32 token ids [rows]
  (NOT_FINITE: the row held NaN, +inf or only -inf; NONE_ALLOWED: the masks leave none), and a list with `(token_id,
  logprob, rank, top_ids, top_logprobs)` for rows whose slot asked for logprobs, None for others. Records the tokens as
  output.
- `logprobs(logits, targets, top_n)`: the same tuples for given (prompt) tokens; None for a row that is not finite.
- `survivors(logits, slot)`: the tokens from which `sample` would draw: int32 ids, ascending, and float32 weights, to
  be divided by their sum; logits [1, vocab], temperature above 0.

Rows run on `pool` if one is given. Results do not depend on it, on the batch or on the instruction set.
`uniform_at(seed, position, stream=0)` is the random number of an output token; stream 1 is the one for its XTC.
"""

from moeserve.kernels._C import SamplerState, runs_by_lag, uniform_at

MAX_TOP_LOGPROBS = 20
NOT_FINITE, NONE_ALLOWED = -1, -2  # instead of a token, also in the GPU's kernels

__all__ = ["MAX_TOP_LOGPROBS", "NONE_ALLOWED", "NOT_FINITE", "SamplerState", "runs_by_lag", "uniform_at"]
