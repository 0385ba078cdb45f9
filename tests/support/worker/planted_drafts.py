"""Drafts of a block on a GPU, replaced by others that a test foresees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.worker.drafts.gpu_next_token_drafter import GpuNextTokenDrafter
from moeserve.worker.drafts.made_drafter import FirstOf
from moeserve.worker.engines.gpu.next_token_chain import ChainStart, LaunchedChain
from moeserve.worker.runner import Runner
from tests.support.worker.foreseen_drafts import Foreseen


class Planted:
    """The block's drafts are noted, and others planted in their place, some of them right and some unlikely: on the
    device, where the step that verifies them takes them from."""

    def __init__(
        self,
        runner: Runner,
        texts: list[list[int]],
        monkeypatch: pytest.MonkeyPatch,
        found: list[list[int]] | None = None,
    ) -> None:
        """texts: from which right drafts are taken. found: the texts that come out; None: these."""
        rows = runner._drafts
        assert rows is not None
        assert isinstance(rows._drafter, FirstOf)
        drafter = rows._drafter._second
        assert isinstance(drafter, GpuNextTokenDrafter)
        self._chain, self._tokens, self._length = drafter._chain, runner._sequences.tokens, rows.length
        self._texts = texts if found is None else found
        self.num_after_step = 0  # chains after tokens that the host did not know
        self._foreseen, self._launch = Foreseen(self._tokens, texts, 0.7), self._chain.launch
        self._rng = np.random.default_rng(1)
        self.noted: list[tuple[list[int], list[int]]] = []  # texts, and the drafts after them
        self.logits: list[torch.Tensor] = []  # float32 [scored], of the last draft of a request that is alone
        monkeypatch.setattr(self._chain, "launch", self.launch)

    def launch(self, start: ChainStart) -> LaunchedChain:
        launched = self._launch(start)
        drafts, _ = launched.found()
        self.logits.append(self._chain._block.logits(1)[0].cpu().clone())
        outputs, depths = self._chain._block.chain.outputs, len(drafts)
        for at, (slot, most) in enumerate(zip(start.req_slots.tolist(), start.most.tolist(), strict=True)):
            after, known = start.after_step, self._length[slot]
            so_far = self._tokens[slot, :known].tolist()
            if after is not None:  # tokens from the first sampled one on are not known
                so_far = self._so_far(so_far[: int(after.positions[at])], at, most)
            self.noted.append((so_far, drafts[:most, at].tolist()))
            planted = np.full(depths, 5, np.int32)
            right = self._foreseen.behind(so_far, most)
            planted[: len(right)] = right
            likely = self._rng.random(depths) < 0.8
            outputs[0, :depths, at] = torch.from_numpy(planted).to(outputs.device).view(torch.float32)
            outputs[1, :depths, at] = torch.from_numpy(np.where(likely, 0.9, 0.1).astype(np.float32)).to(
                outputs.device
            )
        launched.room.found.copy_(outputs)
        self.num_after_step += start.after_step is not None
        return launched

    def _so_far(self, known: list[int], at: int, most: int) -> list[int]:
        """The text before a chain of `most` drafts that began after tokens the host does not know."""
        text = next(text for text in self._texts if text[: len(known)] == known)
        position = int(self._chain._block.chain.rows.positions[at]) - (most - 1)  # of the first draft's row
        return text[: position + 2]


def always_draft(monkeypatch: pytest.MonkeyPatch, depths: int) -> None:
    """As many drafts as there may be, whatever they bring."""
    monkeypatch.setattr(
        DraftLength,
        "choose",
        lambda self, records, *_: ([depths] * len(records), float(depths * len(records))),
    )
