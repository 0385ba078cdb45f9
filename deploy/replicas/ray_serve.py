"""Several moeserve servers under Ray Serve: autoscaled, and each prompt goes to the one that has most of it cached.

    pip install moeserve "ray[serve]"
    PYTHONPATH=deploy/replicas serve run deploy/replicas/ray_serve.yaml

A `Server` replica owns one `moeserve serve` process on a Unix socket. `Gateway` takes HTTP, which is the servers' own,
and passes it on as it is. docs/how-to/replicas.md explains both.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

log = logging.getLogger("ray.serve")

READY_S: Final = 1800  # for a large model to load
ATTEMPTS: Final = 3  # at servers, for a request whose answer has not begun
_PR_SET_PDEATHSIG: Final = 1
_HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host"}
)


class Options(BaseModel):
    """The `args` of ray_serve.yaml."""

    model: str = ""  # as --model; "": the demonstration model
    name: str = "moeserve"  # as --served-model-name
    flags: str = ""  # further flags of `moeserve serve`
    command: str = "moeserve"
    num_cpus: float = 1  # that Ray reserves for a server
    num_gpus: float = 0
    min_replicas: int = 1
    max_replicas: int = 3
    target_ongoing_requests: float = 8  # of a server, by which Ray scales
    max_ongoing_requests: int = 256
    upscale_delay_s: float = 10
    downscale_delay_s: float = 600  # a new server's prefix cache is empty


@dataclass(frozen=True)
class Forwarded:
    """An HTTP request on its way to a server."""

    method: str
    path: str  # with the query
    headers: dict[str, str]
    body: bytes
    prompt: str  # what `PrefixRouter` compares


class PrefixRouter(RequestRouter):
    """Sends a prompt to the server that has read most of it before, unless that has far more to do than another.

    It remembers which server read which blocks of text last. A prompt is cut into blocks, each hashed with those before
    it, so that one look-up a block finds the longest known beginning.
    """

    def initialize_state(
        self, block_chars: int = 256, max_blocks: int = 200_000, min_match: float = 0.5, imbalance: int = 8
    ) -> None:
        """`min_match`: the share of a prompt's blocks from which a match counts. `imbalance`: requests that the
        matching server may have more than the least busy one."""
        self._block_chars, self._max_blocks = block_chars, max_blocks
        self._min_match, self._imbalance = min_match, imbalance
        self._readers: OrderedDict[int, ReplicaID] = OrderedDict()  # by block; the oldest first
        self._num_blocks: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or len(candidate_replicas) < 2:
            return [candidate_replicas]
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        chosen = self._choose(list(self._blocks(pending_request.args[0].prompt)), list(by_id))
        others = [replica for identity, replica in by_id.items() if identity != chosen]
        return [[by_id[chosen]], others]

    def _choose(self, blocks: Sequence[int], servers: Sequence[ReplicaID]) -> ReplicaID:
        load = {server: self.replica_queue_len_cache.get(server) or 0 for server in servers}
        least = min(load.values())
        known = [self._readers[block] for block in blocks if block in self._readers]
        if known and len(known) >= self._min_match * len(blocks):
            reader = known[-1]
            if reader in load and load[reader] <= least + self._imbalance:
                return reader
        return min(
            servers, key=lambda server: (load[server] - least > self._imbalance, self._num_blocks[server])
        )

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        for block in self._blocks(pending_request.args[0].prompt):
            self._forget(block)
            self._readers[block] = replica_id
            self._num_blocks[replica_id] += 1
        while len(self._readers) > self._max_blocks:
            self._forget(next(iter(self._readers)))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        there = {replica.replica_id for replica in replicas}
        for block in [block for block, reader in self._readers.items() if reader not in there]:
            self._forget(block)

    def _forget(self, block: int) -> None:
        reader = self._readers.pop(block, None)
        if reader is not None:
            self._num_blocks[reader] -= 1

    def _blocks(self, prompt: str) -> Iterator[int]:
        before = 0
        for start in range(0, len(prompt), self._block_chars):
            before = hash((before, prompt[start : start + self._block_chars]))
            yield before


@serve.deployment(
    request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    health_check_period_s=2,
    graceful_shutdown_timeout_s=120,  # for running answers
)
class Server:
    """One server. Ray replaces it when its process ends."""

    async def __init__(self, options: Options) -> None:
        self._folder = tempfile.mkdtemp(prefix="moeserve-")
        path = os.path.join(self._folder, "http.sock")
        command = [*shlex.split(options.command), "serve", "--uds", path, "--served-model-name", options.name]
        if options.model:
            command += ["--model", options.model]
        self._process = subprocess.Popen(
            [*command, *shlex.split(options.flags)], stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent
        )
        self._session = aiohttp.ClientSession(
            "http://server",
            connector=aiohttp.UnixConnector(path, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        async with asyncio.timeout(READY_S):
            while not await self._is_ready():
                await asyncio.sleep(0.2)

    async def forward(self, request: Forwarded) -> AsyncIterator[tuple[int, dict[str, str]] | bytes]:
        """Yields status and headers, then the body as it comes."""
        async with self._session.request(
            request.method, request.path, data=request.body or None, headers=request.headers
        ) as response:
            yield response.status, _passed_on(response.headers)
            async for piece in response.content.iter_any():
                yield piece

    async def check_health(self) -> None:
        self._check_process()
        async with self._session.get("/health/live", timeout=aiohttp.ClientTimeout(total=10)) as response:
            response.raise_for_status()

    async def _is_ready(self) -> bool:
        self._check_process()
        try:
            async with self._session.get("/health/ready") as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    def _check_process(self) -> None:
        """Raises RuntimeError where the server has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(
                f"moeserve ended with exit code {self._process.returncode}; its log is this replica's"
            )

    async def __del__(self) -> None:
        self._process.terminate()
        await asyncio.to_thread(self._process.wait)
        await self._session.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _die_with_parent() -> None:
    """A replica that Ray kills takes its server with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@serve.deployment(max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0})
class Gateway:
    def __init__(self, servers: DeploymentHandle) -> None:
        self._servers = servers.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """A server that is lost before its answer begins is tried again elsewhere."""
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        forwarded = Forwarded(request.method, path, _passed_on(request.headers), body, _prompt_of(body))
        for _ in range(ATTEMPTS):
            answer = self._servers.forward.remote(forwarded)
            try:
                status, headers = await anext(answer)
            except RayError as error:
                log.warning("a server was lost before its answer began: %s", type(error).__name__)
                continue
            return StreamingResponse(_rest(answer, headers), status, headers)
        message = "no server could answer"
        return JSONResponse(
            {"error": {"message": message, "type": "service_unavailable"}}, 503, {"retry-after": "5"}
        )


async def _rest(answer: AsyncIterator[bytes], headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body. A stream whose server is lost ends with an error event; other bodies are cut off."""
    try:
        async for piece in answer:
            yield piece
    except RayError:
        if not headers.get("content-type", "").startswith("text/event-stream"):
            raise
        error = {
            "error": {"message": "the server of this answer was lost", "type": "server_error", "code": 502}
        }
        yield f"data: {json.dumps(error)}\n\n".encode()


def _passed_on(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}


def _prompt_of(body: bytes) -> str:
    """What a prompt begins with, in any of the APIs; "" where there is none."""
    try:
        fields = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    names = ("tools", "system", "instructions", "messages", "prompt", "input", "inputs")
    return "".join(json.dumps(fields[name]) for name in names if name in fields)


def application(arguments: dict[str, Any]) -> serve.Application:
    """Takes the fields of Options."""
    options = Options.model_validate(arguments)
    servers = Server.options(
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        max_ongoing_requests=options.max_ongoing_requests,
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_ongoing_requests,
            upscale_delay_s=options.upscale_delay_s,
            downscale_delay_s=options.downscale_delay_s,
        ),
    )
    return Gateway.bind(servers.bind(options))
