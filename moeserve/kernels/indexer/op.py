"""Launches the indexer's operations: index keys are stored, scored, and the keys that rows attend to are chosen."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.attention.op import PROGRAMS
from moeserve.kernels.choice_rule import ChoiceRule
from moeserve.kernels.indexer.choice import choose_kernel
from moeserve.kernels.indexer.triton import index_scores_kernel, index_store_kernel
from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.rope.op import rotary_dim

HEADS_TOGETHER = 64  # index heads of a row that are multiplied with keys together, at most
SHARING_ROWS = 16  # rows of a prompt that share a program's index keys
SCORED_KEYS = 16384  # numbers of index keys that a program multiplies at once: 128 keys of 128
CHOSEN_TOGETHER = 8192  # scores that a program reads at once


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

    q [n, heads * dim], keys [n, dim], rows at any stride; norm, bias float32 [dim]; cos, sin float32 [positions,
    rotary / 2]; positions, slots int32 [n] (negative slot: not stored); queries float16 [n, heads, dim]; index_keys
    float16 [slots, 1, dim].
    """
    n, heads, dim = queries.shape
    index_store_kernel(
        (n, heads + 1), q, keys, norm, bias, cos, sin, positions, slots, count, queries, index_keys, q.stride(0),
        keys.stride(0), heads, dim, rotary_dim(cos, dim), in_pairs, eps, next_power_of_2(dim), pdl(), num_warps=4,
        launch_pdl=pdl(),
    )  # fmt: skip


def rows_together(scores: Tensor, rows: int, length: int, choices: int = 1) -> int:
    """Returns how many of `rows` rows can be scored together. scores: flat buffer; length: of the slot table. Beyond
    16 rows a multiple of 16, so that parts of other tensors begin at aligned addresses."""
    fitting = len(scores) // (length * choices)
    return rows if fitting >= rows else fitting // 16 * 16 or fitting


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
    1, dim]; table int32 [requests, length]; req_slots, positions int32 [n]; first_row int32 [1]; scores flat float32:
    row i's are at i * length. are_prompts: neighbouring rows are mostly of one request.
    """
    _, heads, dim = q.shape
    size, together = max(16, next_power_of_2(dim)), max(16, min(HEADS_TOGETHER, next_power_of_2(heads)))
    keys, sharing = max(16, min(128, SCORED_KEYS // size)), SHARING_ROWS if are_prompts else 1
    groups, blocks = -(-rows // sharing), -(-table.stride(0) // (keys * rule.block))
    index_scores_kernel(
        (groups, max(1, min(blocks, PROGRAMS // groups))), q, weights, index_keys, table, req_slots, positions, count,
        first_row, scores, 0 if weights is None else weights.stride(0), table.stride(0), heads, dim, rule.top,
        rule.block, size, together, sharing, keys, pdl(), num_warps=4, num_stages=2, launch_pdl=pdl(),
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

    scores: from `score_keys` for these rows; chosen int32 [n, choices, blocks of a row], KV slots if `rule.block` is
    1; lasts int32 [n].
    """
    _, choices, width = chosen.shape
    chunk = min(CHOSEN_TOGETHER, max(256, next_power_of_2(-(-table.stride(0) // rule.block))))
    choose_kernel(
        (rows, choices), scores, table, req_slots, positions, count, first_row, chosen, lasts, table.stride(0), choices,
        rule.top, rule.block, rule.local, width, rule.block == 1, chunk, pdl(), num_warps=max(4, chunk // 512),
        launch_pdl=pdl(),
    )  # fmt: skip
