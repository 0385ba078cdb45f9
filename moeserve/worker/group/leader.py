"""The first GPU's side of a group: it starts the other GPUs' processes, and has them run what its runner runs.

A follower that ends while the group serves ends the leader, whose steps could only wait for it: killed where the
follower was killed, else as after a crash. The kernel then ends the other followers, and the launcher deals with the
loss of a worker.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch.distributed as dist

from moeserve.config import ServerConfig, to_json_dict
from moeserve.errors import ConfigError
from moeserve.messages.ranks import (
    RankExperts,
    RankExpertsWanted,
    RankFailed,
    RankForget,
    RankStart,
    RankStep,
    RankValue,
    RankValues,
)
from moeserve.messages.steps import ExpertUse, StepPlan, StepResult, WorkerReady
from moeserve.process import python_environment
from moeserve.worker.constraints import Constraints
from moeserve.worker.engines.engine import Engine
from moeserve.worker.group.expert_use import rank_experts, together
from moeserve.worker.group.line import receive_from_follower, send
from moeserve.worker.group.ranks import RankGroup, set_environment
from moeserve.worker.runner import LaunchedStep, Runner
from moeserve.worker.step_recorder import StepRecorder

FOLLOWER = (sys.executable, "-P", "-m", "moeserve.worker.group.follower")
EXIT_TIMEOUT_S = 5.0
LAST_WORDS_S = 2.0  # for what a follower said before its end to be read, and raised

log = logging.getLogger(__name__)


class LeaderGroup(RankGroup):
    """Owns the followers' processes."""

    def __init__(
        self,
        config: ServerConfig,
        devices: list[int],
        num_ranks: int,
        command: Sequence[str] = FOLLOWER,
    ) -> None:
        """Starts the followers, which begin to load. command: what runs one."""
        set_environment()
        self._folder = tempfile.TemporaryDirectory(prefix="moeserve-ranks-")
        super().__init__(0, devices, num_ranks, Path(self._folder.name) / "rendezvous")
        self._is_closing = False
        self._lines: list[socket.socket] = []
        self._followers: list[subprocess.Popen[bytes]] = []
        told = msgspec.json.encode(to_json_dict(config))
        for rank in range(1, num_ranks):
            start = RankStart(told, rank, devices, num_ranks, os.getpid(), str(self._rendezvous))
            self._start_follower(command, start)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _start_follower(self, command: Sequence[str], start: RankStart) -> None:
        line, theirs = socket.socketpair()
        with theirs:
            self._followers.append(subprocess.Popen(command, stdin=theirs.fileno(), env=python_environment()))
        self._lines.append(line)
        send(line, start)

    def gather(self, value: int) -> list[int]:
        values = [value]
        for rank, line in enumerate(self._lines, 1):
            try:
                said = receive_from_follower(line)
            except EOFError:
                time.sleep(LAST_WORDS_S)  # `_watch` ends this process
                raise
            if isinstance(said, RankFailed):
                raise ConfigError(f"GPU {rank} of {self.num_ranks}: {said.message}")
            assert isinstance(said, RankValue)
            values.append(said.value)
        self._tell(RankValues(values))
        return values

    def step(self, plan: StepPlan, sampled: list[bytes]) -> None:
        """Has the followers run `plan`; sampled: see `RankStep`."""
        self._tell(RankStep(plan, sampled))

    def forget(self) -> None:
        """Nothing stays of the last step."""
        self._tell(RankForget())

    def experts(self) -> list[RankExperts]:
        """Of each follower, between two steps."""
        self._tell(RankExpertsWanted())
        answers = [receive_from_follower(line) for line in self._lines]
        return [answer for answer in answers if isinstance(answer, RankExperts)]

    def close(self) -> None:
        """The followers end."""
        self._is_closing = True
        for line in self._lines:
            line.close()
        for follower in self._followers:
            try:
                follower.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # it waits for this rank, within NCCL
                follower.kill()
                follower.wait()
        # NCCL's goes with the process: on its own way out a rank waits for the others, for ever where one has gone.
        if dist.is_initialized() and dist.get_backend() != dist.Backend.NCCL:
            dist.destroy_process_group()
        self._folder.cleanup()

    def _tell(self, message: RankValues | RankStep | RankForget | RankExpertsWanted) -> None:
        for line in self._lines:
            send(line, message)

    def _watch(self) -> None:
        """Until a follower ends. If it should not have, this process ends as it did."""
        poller = select.poll()
        ends = {os.pidfd_open(follower.pid): follower for follower in self._followers}
        for descriptor in ends:
            poller.register(descriptor, select.POLLIN)
        ended = ends[poller.poll()[0][0]]
        code = ended.wait()
        for descriptor in ends:
            os.close(descriptor)
        time.sleep(LAST_WORDS_S if code > 0 else 0.0)
        if self._is_closing:
            return
        rank = 1 + self._followers.index(ended)
        how = f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"
        log.error(
            "the process of GPU %d of %d has ended (%s), and so does the worker", rank, self.num_ranks, how
        )
        logging.shutdown()
        if code == -signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)  # somebody's, from outside, and no crash
        os._exit(max(1, code))


class LeaderRunner(Runner):
    """A runner whose steps the followers run too."""

    def __init__(
        self,
        group: LeaderGroup,
        engine: Engine,
        ready: WorkerReady,
        constraints: Constraints,
        recorder: StepRecorder | None = None,
    ) -> None:
        super().__init__(engine, ready, constraints, recorder)
        self.group = group
        self._sampled: list[bytes] = []  # what followers have not been told

    def rehearse(self, plan: StepPlan) -> StepResult:
        result = super().rehearse(plan)
        self.group.forget()
        return result

    def expert_use(self) -> ExpertUse:
        """Every GPU's, together."""
        ranks = [rank_experts(self.engine, 0), *self.group.experts()]
        return together(ranks, self._ready.num_experts, self._ready.experts_per_token)

    def finish(self) -> StepResult:
        step = self._under_way
        assert step is not None
        result = super().finish()
        # As they stand in the tables of tokens, which followers keep too. Behind a full context there is no place.
        layout, tokens = step.layout, self._sequences.tokens
        inside = np.minimum(layout.sampled_positions, tokens.shape[1] - 1)
        self._sampled.append(tokens[layout.sampled_slots, inside].tobytes())
        return result

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        sampled, self._sampled = self._sampled, []
        self.group.step(plan, sampled)
        return super()._launch(plan)
