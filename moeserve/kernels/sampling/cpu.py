"""The C++ sampler: about 10 us for a greedy or top-k row of 151,936 logits, 100 us where every logit counts.

`SamplerState(max_num_seqs, vocab, pool=None, isa=None)` keeps what each request slot needs between steps: its
parameters, the counts for its penalties, the number of its output tokens. Its calls work on whole batches:

- `bind(slot, *, seed, ..., order, dry_breakers, **settings)` overwrites a slot; ValueError for ids out of range.
  `settings` are those of moeserve/sampling/parameters.py, `order` is `moeserve.sampling.order.order_code`'s,
  `dry_breakers` int32: token sequences, each closed by -1.
- `sample(logits, slots, masks=None, mask_of=None)`: float32 logits [rows, vocab], int32 slots [rows], no slot twice.
  Row i may only sample tokens whose bit is set in masks[mask_of[i]] (int32 [any, words], the lowest bit first; tokens
  behind the last word are out), and every token where mask_of[i] (int32 [rows]) is negative. Returns int32 token
  ids [rows] (NOT_FINITE: the row held NaN, +inf or nothing but -inf; NONE_ALLOWED: the masks leave none) and a list
  with `(token_id, logprob, rank, top_ids, top_logprobs)` for rows whose slot asked for logprobs, None for others.
  Notes the tokens as output.
- `logprobs(logits, targets, top_n)`: the same tuples for given tokens (a prompt's); None for a row as above.
- `survivors(logits, slot)`: what `sample` would draw from: int32 ids, rising, and float32 weights, to be divided
  by their sum; logits [1, vocab], temperature above 0.

Rows run on `pool` where one is given. Results do not depend on it, on the batch or on the instruction set.
`uniform_at(seed, position, stream=0)` is the random number behind an output token, and with stream 1 behind its XTC.
"""

from moeserve.kernels._C import SamplerState, runs_by_lag, uniform_at

MAX_TOP_LOGPROBS = 20
NOT_FINITE, NONE_ALLOWED = -1, -2  # in a token's place, the GPU's kernels' too

__all__ = ["MAX_TOP_LOGPROBS", "NONE_ALLOWED", "NOT_FINITE", "SamplerState", "runs_by_lag", "uniform_at"]
