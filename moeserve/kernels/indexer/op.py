"""Launches the indexer's operations: index keys are stored, scored, and the keys that rows attend to are chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.attention.workspace import PROGRAMS
from moeserve.kernels.choice_rule import (
    MOST_PARTS,
    ChoiceRule,
    candidates_of_choice,
    numbers_of_choice,
    sample_of_choice,
    stride_of_choice,
)
from moeserve.kernels.indexer.blocks_triton import (
    block_index_kernel,
    block_maxima_kernel,
    complete_blocks_kernel,
)
from moeserve.kernels.indexer.choice import choose_kernel, collect_kernel, count_kernel
from moeserve.kernels.indexer.pools_triton import complete_pools_kernel, pool_store_kernel
from moeserve.kernels.indexer.triton import index_scores_kernel, index_store_kernel
from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.rope.op import SectionPositions, rotary_dim

HEADS_TOGETHER = 64  # index heads of a row that are multiplied with keys together, at most
SHARING_ROWS = 16  # rows of a prompt that share a program's index keys
SCORED_KEYS = 16384  # numbers of index keys that a program multiplies at once: 128 keys of 128
CHOSEN_TOGETHER = 2048  # scores that one of several programs of a row reads at once
SHARING_WARPS = 8
SHARING_PROGRAMS = 264  # that share choices: two per multiprocessor of an H200


def index_store(
    q: Tensor,
    keys: Tensor,
    norm: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    count: Tensor,
    queries: Tensor,
    index_keys: Tensor,
    *,
    in_pairs: bool,
) -> None:
    """Writes the rotated index queries, and stores the tokens' index keys in the KV pool, for i < count[0]:
    `reference.index_store`.

    q [n, heads * dim], keys [n, dim], rows at any stride; norm, bias float32 [dim]; cos, sin float32 [positions, rotary
    / 2]; positions, slots int32 [n] (negative slot: not stored); queries float16 [n, heads, dim]; index_keys float16
    [slots, 1, dim]. eps: added to the variance under the LayerNorm's root.
    """
    n, heads, dim = queries.shape
    index_store_kernel(
        (n, heads + 1), q, keys, norm, bias, cos, sin, positions, slots, count, queries, index_keys, q.stride(0),
        keys.stride(0), heads, dim, rotary_dim(cos, dim), in_pairs, eps, next_power_of_2(dim), pdl(), num_warps=4,
        launch_pdl=pdl(),
    )  # fmt: skip


def block_index_store(
    q: Tensor,
    keys: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    table: Tensor,
    req_slots: Tensor,
    positions: Tensor,
    slots: Tensor,
    count: Tensor,
    rule: ChoiceRule,
    queries: Tensor,
    index_keys: Tensor,
    sections: SectionPositions | None = None,
    firsts: Tensor | None = None,
) -> None:
    """Writes the normalised and rotated index queries, and stores index keys, of each token or of each block that the
    rows complete, for i < count[0]: blocks.py. Keys of blocks that are not complete are stored unchanged, for a later
    call.

    q_norm, k_norm float32 [dim]; table int32 [requests, length], which has the rows' slots; req_slots int32 [n].
    sections: what rows rotate by, instead of positions; with them, firsts, int32 [n, 3]: the same of the first token
    of each row's block. Other arguments as for `index_store`. eps: added to the mean square under the norm's root."""
    (n, heads, dim), rotary = queries.shape, rotary_dim(cos, queries.shape[2])
    size = next_power_of_2(dim)
    widths = (0, 0, 0) if sections is None else (sections.height, sections.width, sections.time)
    by = None if sections is None else sections.positions
    block_index_kernel(
        (n, heads + 1), q, keys, q_norm, k_norm, cos, sin, positions, by, slots, count, queries, index_keys,
        q.stride(0), keys.stride(0), heads, dim, rotary, eps, rule.local > 0, size, *widths, pdl(), num_warps=4,
        launch_pdl=pdl(),
    )  # fmt: skip
    if not rule.local:
        complete_blocks_kernel(
            (n,), table, req_slots, k_norm, cos, sin, positions, firsts, slots, count, index_keys, table.stride(0), dim,
            rotary, eps, rule.block, size, *widths, pdl(), num_warps=4, launch_pdl=pdl(),
        )  # fmt: skip


def pool_store(
    q: Tensor,
    keys: Tensor,
    gates: Tensor,
    norm: Tensor,
    bias: Tensor,
    eps: float,
    ape: Tensor,
    table: Tensor,
    req_slots: Tensor,
    positions: Tensor,
    slots: Tensor,
    count: Tensor,
    queries: Tensor,
    index_keys: Tensor,
) -> None:
    """Writes the index queries, and stores the index keys of the blocks that the rows complete, for i < count[0]:
    `pools.pooled_keys`. Keys and gates of blocks that are not complete are stored, for a later call.

    gates [n, dim], rows at any stride; ape float32 [keys of a block, dim]; table int32 [requests, length], which has
    the rows' slots; req_slots int32 [n]; index_keys float16 [slots, 1, 2 * dim]. Other arguments as for `index_store`.
    eps: added to the variance under the LayerNorm's root.
    """
    (n, heads, dim), size = queries.shape, next_power_of_2(queries.shape[2])
    pool_store_kernel(
        (n, heads + 1), q, keys, gates, norm, bias, slots, count, queries, index_keys, q.stride(0), keys.stride(0),
        gates.stride(0), heads, dim, eps, size, pdl(), num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip
    complete_pools_kernel(
        (n,), table, req_slots, ape, positions, slots, count, index_keys, table.stride(0), dim, len(ape), size, pdl(),
        num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip


def rows_together(scores: Tensor, rows: int, of_row: int) -> int:
    """Returns how many of `rows` rows can be scored together: all, or a multiple of SHARING_ROWS, because a program
    writes the scores of that number of rows. scores: flat buffer; of_row: elements of it that one row takes. Raises
    ValueError without room for SHARING_ROWS rows."""
    fitting = len(scores) // of_row
    if fitting >= rows:
        return rows
    if fitting < SHARING_ROWS:
        raise ValueError(
            f"`scores` has room for only {fitting} of {rows} rows; enlarge it to at least {SHARING_ROWS} rows"
        )
    return fitting // SHARING_ROWS * SHARING_ROWS


def score_keys(
    q: Tensor,
    weights: Tensor | None,
    index_keys: Tensor,
    table: Tensor,
    req_slots: Tensor,
    positions: Tensor,
    count: Tensor,
    first_row: Tensor,
    rows: int,
    rule: ChoiceRule,
    scores: Tensor,
    *,
    are_prompts: bool,
) -> None:
    """Scores the blocks that rows first_row[0] + i < count[0] choose from, i < rows: `reference.index_scores`, or
    without weights `blocks.block_scores` of a rule that is not local.

    q float16 [n, heads, dim], from `index_store`; weights [n, heads], rows at any stride; index_keys float16 [slots,
    1, dim or more]; table int32 [requests, length]; req_slots, positions int32 [n]; first_row int32 [1]; rows: of
    `rows_together`; scores flat float32: row i's are at i * `stride_of_choice`. are_prompts: neighbouring rows are
    mostly of one request.
    """
    _, heads, dim = q.shape
    size, together = max(16, next_power_of_2(dim)), max(16, min(HEADS_TOGETHER, next_power_of_2(heads)))
    keys, sharing = max(16, min(128, SCORED_KEYS // size)), SHARING_ROWS if are_prompts else 1
    groups, of_row = -(-rows // sharing), stride_of_choice(table.stride(0), rule)
    index_scores_kernel(
        (groups, max(1, min(-(-of_row // keys), PROGRAMS // groups))), q, weights, index_keys, table, req_slots,
        positions, count, first_row, scores, 0 if weights is None else weights.stride(0), index_keys.stride(0),
        table.stride(0), of_row, heads, dim, rule.top, rule.block, size, together, sharing, keys, pdl(), num_warps=4,
        num_stages=2, launch_pdl=pdl(),
    )  # fmt: skip


def score_blocks(
    q: Tensor,
    index_keys: Tensor,
    table: Tensor,
    req_slots: Tensor,
    positions: Tensor,
    count: Tensor,
    first_row: Tensor,
    rows: int,
    rule: ChoiceRule,
    scores: Tensor,
    *,
    are_prompts: bool,
) -> None:
    """Scores the blocks that each head of rows first_row[0] + i < count[0] chooses from, i < rows:
    `blocks.block_scores` of a local rule. scores: choice c of row i is at (i * heads + c) * `stride_of_choice`. Other
    arguments as for `score_keys`."""
    _, heads, dim = q.shape
    size, h = max(16, next_power_of_2(dim)), next_power_of_2(heads)
    sharing = max(1, min(SHARING_ROWS, HEADS_TOGETHER // h)) if are_prompts else 1
    keys = max(16, min(128, next_power_of_2(rule.block), SCORED_KEYS // size))
    groups, of_row = -(-rows // sharing), stride_of_choice(table.stride(0), rule)
    block_maxima_kernel(
        (groups, max(1, min(of_row, PROGRAMS // groups))), q, index_keys, table, req_slots, positions, count, first_row,
        scores, table.stride(0), of_row, heads, dim, rule.top, rule.block, rule.local, size, h, max(16, sharing * h),
        sharing, keys, pdl(), num_warps=4, num_stages=2, launch_pdl=pdl(),
    )  # fmt: skip


def choose(
    scores: Tensor,
    table: Tensor,
    req_slots: Tensor,
    positions: Tensor,
    count: Tensor,
    first_row: Tensor,
    rows: int,
    rule: ChoiceRule,
    chosen: Tensor,
    lasts: Tensor,
) -> None:
    """Writes the blocks that rows first_row[0] + i < count[0] attend to, i < rows, as `choose_kernel` has it:
    `reference.choose_keys`, then the row's tail. Rows without more blocks than are chosen attend to all.

    scores: from `score_keys` or `score_blocks` for these rows; chosen int32 [n, choices, blocks of a row]; lasts int32
    [n]. With blocks of one key, or if `chosen` has room for all keys of a row's blocks, it gets KV slots instead of
    blocks.
    """
    _, choices, width = chosen.shape
    has_slots = rule.block == 1 or width >= rule.most_blocks * rule.block
    length, stride, by = (
        table.stride(0),
        stride_of_choice(table.stride(0), rule),
        (rule.top, rule.block, rule.local),
    )
    size, numbers, parts = candidates_of_choice(length, rule), numbers_of_choice(length, rule), 1
    bits = numbers.bit_length()
    step, scratch = (positions, count, first_row), None
    if size:
        parts, scratch = parts_of_choice(rows * choices, numbers), scores.view(torch.int64)
        shared = (scores, scratch, *step, stride, numbers, choices, *by, parts, size)
        grid, options = (rows, choices, parts), {"num_warps": SHARING_WARPS, "launch_pdl": pdl()}
        count_kernel(grid, *shared, sample_of_choice(length, rule), bits, CHOSEN_TOGETHER, pdl(), **options)
        collect_kernel(grid, *shared, bits, CHOSEN_TOGETHER, pdl(), **options)
    size = size or max(256, next_power_of_2(numbers))
    choose_kernel(
        (rows, choices), scores, scratch, table, req_slots, *step, chosen, lasts, length, stride, numbers, choices, *by,
        width, has_slots, parts, size, bits, min(size, CHOSEN_TOGETHER), pdl(), num_warps=max(1, size // 512),
        launch_pdl=pdl(),
    )  # fmt: skip


def parts_of_choice(choices: int, scores: int) -> int:
    """Returns how many programs share each of `choices` choices among up to `scores` scores, a power of two."""
    parts = max(1, min(MOST_PARTS, SHARING_PROGRAMS // choices, -(-scores // CHOSEN_TOGETHER)))
    return next_power_of_2(parts + 1) // 2
