"""The clocks of a host and of a GPU that computes after it, for an engine under Triton's interpreter, which does at
once what is launched: its links of a chain and its steps take so long on the GPU, and the host's work on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moeserve.messages.steps import StepResult
from moeserve.worker.drafts.gpu_next_token_drafter import GpuNextTokenDrafter
from moeserve.worker.drafts.made_drafter import FirstOf
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.runner import Runner


class GpuClock:
    """Milliseconds. results: of the steps so far."""

    def __init__(
        self,
        runner: Runner,
        monkeypatch: pytest.MonkeyPatch,
        *,
        link_ms: float,
        layers_ms: float,
        reading_ms: float,
        placing_ms: float,
        stage_ms: float = 0.0,
    ) -> None:
        """The GPU takes link_ms for a draft of each request, and layers_ms for a step's layers. The host takes
        reading_ms after a step's tokens, placing_ms before the next one's layers, and stage_ms for first layers in
        RAM."""
        self.host = self.gpu = 0.0
        self.results: list[StepResult] = []
        engine, rows = runner.engine, runner._drafts
        assert isinstance(engine, GpuEngine)
        assert rows is not None
        assert isinstance(rows._drafter, FirstOf)
        drafter, done = rows._drafter._second, engine._done
        assert isinstance(drafter, GpuNextTokenDrafter)
        monkeypatch.setattr(drafter, "_least", 0.0)  # also drafts that the block finds unlikely are verified
        monkeypatch.setattr(done, "_is_gpu", True)
        monkeypatch.setattr(done, "_ends", [_Event(self) for _ in range(3)])
        for room in drafter._chain._rooms:
            monkeypatch.setattr(room, "ends", [_Event(self) for _ in range(2)])
        clock = SimpleNamespace(perf_counter=lambda: self.host / 1e3, process_time=lambda: self.host / 1e3)
        monkeypatch.setattr("moeserve.worker.runner.time", clock)
        monkeypatch.setattr("moeserve.worker.drafts.spent_time.time", clock)
        monkeypatch.setattr("moeserve.worker.engines.gpu.cpu_stage.time", clock)
        for owner, method, on_host, on_gpu in (
            (runner._runs, "_keep", reading_ms, 0.0),
            (rows, "place", placing_ms, 0.0),
            (engine._launcher, "launch", 0.0, layers_ms),
            (drafter._chain._block, "link", 0.0, link_ms),
        ):
            self._add(monkeypatch, owner, method, on_host, on_gpu)
        if engine._cpu_stage is not None:
            self._add(monkeypatch, engine._cpu_stage._stream, "wait", stage_ms, 0.0)
        for links in drafter._chain._links:  # they hold the method
            monkeypatch.setitem(drafter._chain._links, links, self._link(drafter, links))
        step = runner._result

        def noted(*args: Any) -> StepResult:
            self.results.append(step(*args))
            return self.results[-1]

        monkeypatch.setattr(runner, "_result", noted)

    @staticmethod
    def _link(drafter: GpuNextTokenDrafter, links: tuple[int, bool]) -> Any:
        size, of_shortlist = links
        return lambda: drafter._chain._block.link(size, of_shortlist=of_shortlist)

    def _add(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, on_host: float, on_gpu: float
    ) -> None:
        """Lets a method take this time after what it does."""
        inner = getattr(owner, method)

        def timed(*args: Any, **more: Any) -> Any:
            found = inner(*args, **more)
            self.host += on_host
            if on_gpu:
                self.gpu = max(self.gpu, self.host) + on_gpu
            return found

        monkeypatch.setattr(owner, method, timed)


class _Event:
    """Like `torch.cuda.Event`."""

    def __init__(self, clock: GpuClock) -> None:
        self._clock, self._at = clock, 0.0

    def record(self) -> None:
        self._clock.gpu = self._at = max(self._clock.gpu, self._clock.host)

    def query(self) -> bool:
        return self._clock.host >= self._at

    def synchronize(self) -> None:
        self._clock.host = max(self._clock.host, self._at)

    def elapsed_time(self, end: _Event) -> float:
        return end._at - self._at
