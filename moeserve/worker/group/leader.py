"""The leader of a group of GPUs: starts the other GPUs' processes, and makes them run the same plans.

If a follower ends while the group serves, the leader ends as well, because its steps would wait for it forever: by
SIGKILL if the follower was killed, else as after a crash. The kernel then ends the other followers, and the launcher
replaces the worker.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator, Sequence
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
    ToLeader,
)
from moeserve.messages.steps import ExpertUse, StepPlan, StepResult, WorkerReady
from moeserve.processes.lifecycle import EXIT_USER_ERROR, python_environment
from moeserve.worker.constraints.slot_guides import Constraints
from moeserve.worker.engines.engine import Engine
from moeserve.worker.group.expert_use import rank_experts, together
from moeserve.worker.group.line import receive_from_follower, send
from moeserve.worker.group.ranks import RankGroup, set_environment
from moeserve.worker.plans.launched_step import LaunchedStep, StepTimes
from moeserve.worker.recording.step_recorder import StepRecorder
from moeserve.worker.runner import Runner

FOLLOWER = (sys.executable, "-P", "-m", "moeserve.worker.loading.group.follower")
EXIT_TIMEOUT_S = 5.0
LAST_WORDS_S = 2.0  # wait for the error message of a follower that ended

log = logging.getLogger(__name__)


class LeaderGroup(RankGroup):
    """Starts the followers' processes, sends them the plans, and ends them."""

    def __init__(
        self,
        config: ServerConfig,
        devices: list[int],
        num_ranks: int,
        command: Sequence[str] = FOLLOWER,
    ) -> None:
        """Starts the followers, which begin to load. command: starts a follower."""
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
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def _start_follower(self, command: Sequence[str], start: RankStart) -> None:
        line, theirs = socket.socketpair()
        with theirs:
            self._followers.append(subprocess.Popen(command, stdin=theirs.fileno(), env=python_environment()))
        self._lines.append(line)
        send(line, start)

    def gather(self, value: int) -> list[int]:
        values = [value]
        for rank in range(1, self.num_ranks):
            said = self._hear(rank)
            if isinstance(said, RankFailed):
                raise ConfigError(self._refusal(rank, said))
            assert isinstance(said, RankValue)
            values.append(said.value)
        self._tell(RankValues(values))
        return values

    def step(self, plan: StepPlan, sampled: list[bytes]) -> None:
        """Makes the followers run `plan`. sampled: see `RankStep`."""
        self._tell(RankStep(plan, sampled))

    def forget(self) -> None:
        """Undoes the last step on every rank."""
        self._tell(RankForget())

    def experts(self) -> list[RankExperts]:
        """Returns the expert counts of each follower. Between two steps."""
        self._tell(RankExpertsWanted())
        counts = []
        for rank in range(1, self.num_ranks):
            said = self._hear(rank)
            assert isinstance(said, RankExperts)
            counts.append(said)
        return counts

    def close(self) -> None:
        """Ends the followers."""
        self._is_closing = True
        for line in self._lines:
            line.close()
        for follower in self._followers:
            try:
                follower.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # blocked in NCCL, waiting for this rank
                follower.kill()
                follower.wait()
        # NCCL's group is left to the end of the process: destroying it waits for the other ranks, forever if one is
        # gone.
        if dist.is_initialized() and dist.get_backend() != dist.Backend.NCCL:
            dist.destroy_process_group()
        self._folder.cleanup()

    def _tell(self, message: RankValues | RankStep | RankForget | RankExpertsWanted) -> None:
        with self._end_of_all():
            for line in self._lines:
                send(line, message)

    def _hear(self, rank: int) -> ToLeader:
        with self._end_of_all():
            return receive_from_follower(self._lines[rank - 1])

    @contextlib.contextmanager
    def _end_of_all(self) -> Iterator[None]:
        """A context for sending to followers: if one is gone, waits until `_watch` has reported it and ended this
        process."""
        try:
            yield
        except (EOFError, ConnectionError):
            self._watcher.join(2 * LAST_WORDS_S)
            raise

    def _watch(self) -> None:
        """Waits until a follower ends. If that was unexpected, ends this process in the same way."""
        poller = select.poll()
        ends = {os.pidfd_open(follower.pid): follower for follower in self._followers}
        for descriptor in ends:
            poller.register(descriptor, select.POLLIN)
        ended = ends[poller.poll()[0][0]]
        code = ended.wait()
        for descriptor in ends:
            os.close(descriptor)
        time.sleep(LAST_WORDS_S if code == EXIT_USER_ERROR else 0.0)
        if self._is_closing:
            return
        rank = 1 + self._followers.index(ended)
        refused = self._last_words(rank) if code == EXIT_USER_ERROR else None
        if refused is not None:
            log.error("%s", self._refusal(rank, refused))
        else:
            how = f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"
            log.error("the process of %s has ended (%s), and so does the worker", self._name(rank), how)
        logging.shutdown()
        if code == -signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)  # killed from outside, not crashed
        os._exit(max(1, code))

    def _last_words(self, rank: int) -> RankFailed | None:
        """Returns the reason why an ended follower could not load its share, if it sent one. Otherwise this process
        would learn of it only when all ranks next agree on a value, perhaps a minute later."""
        line = self._lines[rank - 1]
        poller = select.poll()
        poller.register(line, select.POLLIN)
        with contextlib.suppress(EOFError, ConnectionError):
            while poller.poll(0):
                said = receive_from_follower(line)
                if isinstance(said, RankFailed):
                    return said
        return None

    def _refusal(self, rank: int, failed: RankFailed) -> str:
        return f"{self._name(rank)}: {failed.message}"

    def _name(self, rank: int) -> str:
        """Returns the GPU's number as in --gpus."""
        return f"GPU {self.devices[rank]}" if self.devices else f"rank {rank}"


class LeaderRunner(Runner):
    """A runner whose steps the followers run as well."""

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
        self._sampled: list[bytes] = []  # tokens not yet sent to the followers

    def rehearse(self, plan: StepPlan) -> StepResult:
        result = super().rehearse(plan)
        self.group.forget()
        return result

    def expert_use(self) -> ExpertUse:
        """Returns the expert use of all GPUs together."""
        ranks = [rank_experts(self.engine, 0), *self.group.experts()]
        return together(ranks, self._ready.num_experts, self._ready.experts_per_token)

    def _end(self, step: LaunchedStep) -> StepTimes:
        times = super()._end(step)
        # As stored in the token tables, which followers keep as well. A full context has no place for its last token.
        layout, tokens = step.layout, self._sequences.tokens
        inside = np.minimum(layout.sampled_positions, tokens.shape[1] - 1)
        self._sampled.append(tokens[layout.sampled_slots, inside].tobytes())
        return times

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        sampled, self._sampled = self._sampled, []
        self.group.step(plan, sampled)
        return super()._launch(plan)
