"""What is particular to a next-token block on a GPU, beside its specification."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels._C import PANEL_ROWS
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.linear.operands import weight_of
from moeserve.kernels.linear.panel_gemv import multiply_panels
from moeserve.kernels.linear.reference import linear as reference
from moeserve.kernels.next_token.op import (
    BlockPlaces,
    ChainRows,
    Chosen,
    JoinNorms,
    KeptStates,
    SampledRows,
    SampledStep,
    ScoredPanels,
    StepStates,
    block_places,
    clear_rows,
    draft_of,
    join_rows,
    join_step,
    keep_rows,
    keep_step,
    place_drafts,
    start_after_step,
)
from moeserve.kernels.next_token.reference import accepted_drafts, joined_rows, states_before
from moeserve.kernels.planes import dequantize
from moeserve.kernels.quantize.reference import quantize, round_trip
from tests.kernels.quantization.plane_tensors import GUARD, planes_of, tensors
from tests.kernels.weights import Type, activations, nmse

HIDDEN, EPS = 96, 1e-6
DEV = torch.device(DEVICE)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEV)


def test_inputs_of_a_step() -> None:
    """A chunk behind a kept state, one behind a cached prefix, a text's beginning, and padding."""
    positions, requests = [4, 5, 9, 0, 1, 2, 0, 0], [2, 2, 0, 1, 1, 1, 3, 3]
    valid, norms = 6, JoinNorms(normal(HIDDEN, seed=1), normal(HIDDEN, seed=2), EPS)
    step = StepStates(normal(8, HIDDEN, seed=3), ints(positions), ints(requests), counter(valid))
    kept = KeptStates(normal(4, HIDDEN, seed=4), ints([7, 0, 4, 0]))
    before = states_before(step.states.cpu(), positions, requests, kept.states.cpu(), [7, 0, 4, 0])
    assert before[0].any()
    assert not before[[2, 3]].any()
    x = normal(8, HIDDEN, seed=5)
    expected = joined_rows(x.cpu(), before, norms.token.cpu(), norms.state.cpu(), EPS)
    for first in (0, 4):  # in chunks
        out = torch.full((4, 2 * HIDDEN), 77.0, device=DEV)
        join_step(x[first : first + 4], step, first, kept, norms, counter(min(4, valid - first)), out)
        rows = out[: valid - first].cpu()
        torch.testing.assert_close(rows.double(), expected[first : first + len(rows)], atol=1e-5, rtol=1e-5)
        assert (out[valid - first :] == 77.0).all()
    alone = torch.empty(8, 2 * HIDDEN, device=DEV)
    join_rows(x, before.to(DEV), norms, counter(8), alone)
    torch.testing.assert_close(alone.cpu().double(), expected, atol=1e-5, rtol=1e-5)


def test_places() -> None:
    out = BlockPlaces.empty(4, DEV)
    block_places(ints([5, -7, 9, 3]), ints([0, 1, 8, 0]), ints([11, 12, 13, -1]), counter(3), out)
    assert out.token_ids.tolist() == [5, 0, 9, 0]
    assert out.positions.tolist() == [0, 0, 7, 0]
    assert out.kv_slots.tolist() == [-1, 12, 13, 0]


def test_cleared_rows() -> None:
    """The rows of valid slots are cleared in two tensors; -1 is no slot."""
    wide, narrow = normal(6, 2, HIDDEN).half(), normal(6, 3).half()
    expected = [wide.clone(), narrow.clone()]
    for tensor in expected:
        tensor[[4, 1]] = 0.0
    clear_rows([wide, narrow], ints([4, -1, 1, 5]), counter(3))
    assert torch.equal(wide, expected[0])
    assert torch.equal(narrow, expected[1])


def test_kept_states() -> None:
    """Each request's last row of a step; then those that the accepted drafts end with."""
    positions, requests = ints([4, 5, 6, 9, 0]), ints([2, 2, 2, 0, 3])
    step = StepStates(normal(5, HIDDEN), positions, requests, counter(4))
    kept = KeptStates.empty(4, HIDDEN, DEV)
    keep_step(step, kept)
    assert kept.position.tolist() == [10, -1, 7, -1]
    assert torch.equal(kept.states[[2, 0]], step.states[[2, 3]])
    keep_rows(step.states, ints([[2, 0, 9], [1, -1, 9], [6, 0, 9]]), 2, kept)
    assert kept.position.tolist() == [-1, -1, 6, -1]
    assert torch.equal(kept.states[2], step.states[1])
    assert torch.equal(kept.states[0], step.states[3])


@pytest.mark.parametrize("vocab", [640, 70_000])
def test_chain(vocab: int) -> None:
    rows, depths = 3, 2
    chain = ChainRows(
        ints([1, 2, 3, 4]), ints([10, 20, 30, 40]), ints([100, 200, 300, 400]), ints([0] * 4),
        ints([2, 1, 2, 2]), ints([[100, 200, 300, 400], [101, 201, 301, 401]]), ints([[0] * 4] * depths),
        torch.zeros(depths, 4, device=DEV), rotary=ints([[row, 1, 2] for row in range(4)]),
        planned_rotary=ints([[[10 * depth + row, 3, 4] for row in range(4)] for depth in range(depths)]),
    )  # fmt: skip
    chosen = Chosen(4, DEV)
    for depth in range(depths):
        logits = normal(4, vocab, seed=depth)
        logits[0, [7, vocab - 1]] = 30.0  # equal: the lower id
        draft_of(logits, counter(rows), chosen, chain)
        best = logits[:rows].argmax(dim=1).int()
        best[0] = 7
        assert torch.equal(chain.drafts[depth, :rows], best)
        assert torch.equal(chain.token_ids[:rows], best)
        expected = logits.softmax(dim=1).max(dim=1).values
        torch.testing.assert_close(chain.probabilities[depth, :rows], expected[:rows])
    # The second row may have one draft only: it stays where it was.
    assert chain.positions.tolist() == [11, 20, 31, 40]
    assert chain.kv_slots.tolist() == [101, 200, 301, 400]
    assert chain.rotary is not None
    assert chain.rotary.tolist() == [[10, 3, 4], [1, 1, 2], [12, 3, 4], [3, 1, 2]]
    assert chain.drafts[:, 3].tolist() == [0, 0]


def test_tokens_with_other_numbers() -> None:
    """The scores of some tokens alone, as EAGLE-3 heads have them."""
    vocab, live = 640, 2
    chain = ChainRows(
        *(ints([0] * 4) for _ in range(4)),
        ints([1] * 4),
        *ints([[[0] * 4]] * 2),
        torch.zeros(1, 4, device=DEV),
    )
    logits, token_of = normal(4, vocab), ints([3 * at + 2 for at in range(vocab)])
    draft_of(logits, counter(live), Chosen(4, DEV), chain, token_of=token_of)
    expected = [3 * at + 2 for at in logits[:live].argmax(dim=1).tolist()]
    assert chain.drafts[0, :live].tolist() == chain.token_ids[:live].tolist() == expected
    likely = logits[:live].softmax(dim=1).max(dim=1).values
    torch.testing.assert_close(chain.probabilities[0, :live], likely)


@pytest.mark.parametrize("cols", [256, 2048])
def test_a_shortlist(cols: int) -> None:
    """The scored panels' logits and no others; the likeliest token by its number in the vocabulary."""
    vocab, live = 5 * PANEL_ROWS - 7, 2
    p, x = planes_of(Type.Q6_K, vocab, cols), activations("gaussian", 3, cols)
    q = quantize(x.float().cpu())
    scored = ScoredPanels(ints([0, 3, 4, 1]), counter(3))
    logits = torch.full((3, vocab), GUARD, device=DEV)
    final = GpuActivations(None, q.codes.to(DEV), q.scales.to(DEV))
    weight = weight_of(tensors(p), int(p.type), cols)
    multiply_panels(final, weight, scored.panels, scored.count, counter(live), logits)
    tokens = [*range(PANEL_ROWS), *range(3 * PANEL_ROWS, vocab)]
    expected = reference(round_trip(x), dequantize(p, 0).cpu())[:live, tokens]
    assert nmse(logits[:live, : len(tokens)].cpu(), expected) < 1e-12
    assert (logits[:live, len(tokens) :] == GUARD).all()
    assert (logits[live:] == GUARD).all()
    chain = ChainRows(
        *(ints([0] * 4) for _ in range(5)), *ints([[[0] * 4]] * 2), torch.zeros(1, 4, device=DEV)
    )
    draft_of(logits, counter(live), Chosen(4, DEV), chain, scored)
    assert chain.drafts[0, :live].tolist() == [tokens[at] for at in expected.argmax(dim=1).tolist()]
    likely = expected.softmax(dim=1).max(dim=1).values.float()
    torch.testing.assert_close(chain.probabilities[0, :live].cpu(), likely, rtol=1e-4, atol=0.0)


def test_drafts_of_a_step() -> None:
    """Placeholders become drafts, and rows from the first unlikely one on are left out, however likely those behind."""
    chain = ChainRows(
        *(ints([0] * 4) for _ in range(5)), ints([[0] * 4] * 3), ints([[50, 9, 9, 9], [60, 9, 9, 9], [70, 9, 9, 9]]),
        torch.tensor([[0.9], [0.4], [0.8]], device=DEV).repeat(1, 4),
    )  # fmt: skip
    for least, rows in ((0.3, 4), (0.5, 2), (0.95, 1)):
        ids, count = ints([7, -1, -5, -9, 0, 0, 0, 0]), counter(4)
        place_drafts(ids, count, chain, torch.tensor([least], device=DEV))
        assert ids.tolist() == [7, 50, 60, 70, 0, 0, 0, 0]
        assert count.tolist() == [rows]
    ids, count = ints([7, -1, 3, 3]), counter(2)  # one draft, and padding
    place_drafts(ids, count, chain, torch.tensor([0.5], device=DEV))
    assert (ids.tolist(), count.tolist()) == ([7, 50, 3, 3], [2])


def test_a_chain_behind_sampled_tokens() -> None:
    """Requests with three, two and no drafts, of which all, one and none are right; one whose last draft was left out
    of the step; and one that cannot continue. With several RoPE positions a row."""
    depths, hidden = 3, HIDDEN
    step_ids = [1, 2, 3, 4, 1, 5, 5, 1, 1, 6, 7, 1, 8]  # each request's known token, then its drafts
    firsts, drafted = [0, 4, 7, 8, 11], [3, 2, 0, 2, 1]
    valid = {3: 1}  # drafts of this request that the step has
    sampled = [[2, 3, 4, 5], [5, 6, 9], [3], [6, 7, 8], [-1, 4]]
    tokens: list[int] = []
    places = [[0] * 8 for _ in range(1 + depths)]
    for number in range(1 + depths):
        for at, found in enumerate(sampled):
            if number < len(found):
                places[number][at] = len(tokens)
                tokens.append(found[number])
    requests, positions = [6, 2, 4, 0, 3], [20, 30, 40, 50, 60]
    for last, live in ((None, 5), (3, 4)):
        accepted = []
        for at, found in enumerate(sampled):
            first = firsts[at] + 1
            drafts = step_ids[first : first + drafted[at]][: valid.get(at) if last == at else None]
            accepted.append(accepted_drafts(found, drafts))
        if last is None:
            assert accepted == [3, 1, 0, 2, 0]
        else:
            assert accepted == [3, 1, 0, 1, 0]
        count = 13 if last is None else firsts[last] + 1 + valid[last]
        states, kept = normal(16, hidden), KeptStates.empty(8, hidden, DEV)
        zeros = [ints([0] * 8) for _ in range(5)]
        chain = ChainRows(
            *zeros, ints([[0] * 8] * depths), ints([[0] * 8] * depths), torch.zeros(depths, 8, device=DEV),
            rotary=ints([[0] * 3] * 8), planned_rotary=ints([[[0] * 3] * 8] * depths),
        )  # fmt: skip
        slots = ints([[100 * at + number for at in range(8)] for number in range(2 * depths)])
        pad = [0, 0, 0]
        rows = SampledRows(
            ints(firsts + pad), ints(drafted + pad), ints(positions + pad), ints([0, 0, 0, 5, 0, *pad]),
            ints(places), slots,
        )  # fmt: skip
        begun = torch.full((8, hidden), GUARD, device=DEV)
        step = SampledStep(ints(tokens), ints(step_ids), counter(count))
        start_after_step(step, rows, states, ints(requests + pad), counter(live), chain, begun, kept)
        lasts = [max(found[number], 0) for found, number in zip(sampled, accepted, strict=True)][:live]
        assert chain.token_ids.tolist() == lasts + [0] * (8 - live)
        behind = [position + number for position, number in zip(positions, accepted, strict=True)][:live]
        assert chain.positions[:live].tolist() == [position - 1 for position in behind]
        for at in range(live):
            expected = [100 * at + accepted[at] + depth for depth in range(depths)]
            assert chain.planned_slots[:, at].tolist() == expected
            assert int(chain.kv_slots[at]) == expected[0]
            assert chain.planned_rotary is not None
            shift = 5 if at == 3 else 0
            rotated = [[behind[at] - 1 + shift + depth] * 3 for depth in range(depths)]
            assert chain.planned_rotary[:, at].tolist() == rotated
            assert chain.rotary is not None
            assert chain.rotary[at].tolist() == rotated[0]
            state = states[firsts[at] + accepted[at]]
            assert torch.equal(begun[at], state)
            assert torch.equal(kept.states[requests[at]], state)
            assert int(kept.position[requests[at]]) == behind[at]
        assert (begun[live:] == GUARD).all()
        assert (kept.position == -1).sum() == 8 - live
