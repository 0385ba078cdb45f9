"""A follower, the process of a GPU beyond the first: `python -m moeserve.worker.loading.group.follower`, started by
the leader.

Its standard input is the socket to the leader. It loads its share of the model and runs the leader's steps, but does
not sample: the tokens arrive with the next step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import select
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from setproctitle import setproctitle

from moeserve.config import ServerConfig
from moeserve.errors import UserError
from moeserve.messages.ranks import (
    RankExpertsWanted,
    RankFailed,
    RankForget,
    RankStart,
    RankStep,
    RankValue,
    RankValues,
)
from moeserve.messages.steps import StepPlan
from moeserve.processes.lifecycle import EXIT_USER_ERROR, die_with, end_at_once
from moeserve.processes.logs import set_up_logging
from moeserve.worker.engines.engine import Engine
from moeserve.worker.group.expert_use import rank_experts
from moeserve.worker.group.line import receive_from_leader, send
from moeserve.worker.group.ranks import RankGroup
from moeserve.worker.sequences import Sequences, StepLayout

SPIN_S = 0.005  # longer than the leader's pause between two steps


class FollowerGroup(RankGroup):
    """A follower's connection to the leader and its view of the group."""

    def __init__(self, line: socket.socket, start: RankStart) -> None:
        super().__init__(start.rank, start.devices, start.num_ranks, Path(start.rendezvous))
        self._line = line

    def gather(self, value: int) -> list[int]:
        send(self._line, RankValue(value))
        said = receive_from_leader(self._line)
        assert isinstance(said, RankValues)
        return said.values


class Follower:
    """Runs steps on one GPU in the same way as the leader's runner."""

    def __init__(self, engine: Engine, max_num_seqs: int, max_model_len: int, first_layer: int = 0) -> None:
        """first_layer: index in the model of the engine's layer 0."""
        self._engine = engine
        self._first_layer = first_layer
        self._sequences = Sequences(max_num_seqs, max_model_len)
        self._last_layout: StepLayout | None = None
        self._unsampled: deque[StepLayout] = deque()  # steps whose tokens have not arrived from the leader

    def run(self, line: socket.socket) -> None:
        """Runs steps until the leader closes the socket."""
        while True:
            _spin(line)
            try:
                said = receive_from_leader(line)
            except EOFError:
                return
            if isinstance(said, RankStep):
                for tokens in said.sampled:
                    self._append(np.frombuffer(tokens, np.int32))
                self._step(said.plan)
            elif isinstance(said, RankExpertsWanted):
                send(line, rank_experts(self._engine, self._first_layer))
            else:
                assert isinstance(said, RankForget)
                if self._last_layout is not None:
                    self._engine.forget(self._last_layout)

    def _append(self, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        layout = self._unsampled.popleft()
        self._sequences.append(layout.sampled_slots, layout.sampled_positions, tokens)

    def _step(self, plan: StepPlan) -> None:
        if plan.state_copies or plan.new_seqs:
            self._wait()
        if plan.state_copies:
            self._engine.copy_states(np.frombuffer(plan.state_copies, np.int32).reshape(-1, 2))
        for seq in plan.new_seqs:
            self._engine.bind(seq, self._sequences.bind(seq))
        layout = self._last_layout = StepLayout(plan.rows)
        self._engine.forward(layout, self._sequences, has_new=bool(plan.new_seqs), observer=None)
        self._unsampled.append(layout)
        # If the leader may run ahead, the next step reads this one's samples on the GPU.
        if self._engine.runs_ahead:
            self._sequences.expect(layout.sampled_slots, layout.sampled_positions)
        else:
            self._wait()

    def _wait(self) -> None:
        """Waits for the launched work."""
        self._engine.mark_end()
        self._engine.finish()


def _spin(line: socket.socket) -> None:
    """Spins briefly until the leader sends something: being woken would add 50 us per step."""
    poller, end = select.poll(), time.monotonic() + SPIN_S
    poller.register(line, select.POLLIN)
    while not poller.poll(0) and time.monotonic() < end:
        pass


def main() -> int:
    line = socket.socket(fileno=0)
    start = receive_from_leader(line)
    assert isinstance(start, RankStart)
    die_with(start.leader)
    faulthandler.enable()
    setproctitle(f"moeserve: worker, rank {start.rank}")
    config = msgspec.convert(msgspec.json.decode(start.config, type=dict[str, Any]), ServerConfig)
    config = dataclasses.replace(
        config,
        debug_dump=None,
        debug_dump_steps=None,
        record_routing_trace=None,
        record_routing_tokens=None,
    )
    set_up_logging(f"worker rank {start.rank}", "error", config.log_format)  # the leader logs everything else
    from moeserve.worker.loading.gpu.load import load_gpu_engine
    from moeserve.worker.loading.setup import open_weights, set_up_torch
    from moeserve.worker.loading.start import Start

    group = FollowerGroup(line, start)
    try:
        set_up_torch()
        group.use_device()
        source = open_weights(config)
        loaded = load_gpu_engine(config, source, lambda *_: None, group.device, Start(), ranks=group)
    except UserError as error:
        with contextlib.suppress(ConnectionError):  # the leader had the same error, and has reported it
            send(line, RankFailed(str(error)))
        return EXIT_USER_ERROR
    except (EOFError, ConnectionError):  # the leader could not load its own share, and has reported why
        return EXIT_USER_ERROR
    ready = loaded.ready
    first = 0 if loaded.share is None else loaded.share.first_layer
    Follower(loaded.engine, ready.max_num_seqs, ready.max_model_len, first).run(line)
    return 0


if __name__ == "__main__":
    end_at_once(main())
