"""The router and files of embeddings."""

from __future__ import annotations

import dataclasses
import time

import msgspec

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.schema import (
    Abort,
    GenerateRequest,
    RequestError,
)
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.processes.runtime_paths import RuntimePaths
from moeserve.router.embedding_links import EmbeddingLinks
from tests.support.router.in_process_worker import InProcessWorker
from tests.support.servers.router_process import LIMITS, Neighbours, behaving, running
from tests.support.servers.rpc_child import SLEEP, ScriptedRunner


def test_embeddings_are_linked_while_a_plan_may_name_them(
    paths: RuntimePaths, neighbours: Neighbours
) -> None:
    """The router's own link is there until the request has ended, though its sender removes its own; a request whose
    embeddings are not there fails at once."""
    files = EmbeddingFiles(paths.spans)
    links = EmbeddingLinks(files, 16)
    limits = dataclasses.replace(LIMITS, embedding_bytes=16)

    def asked(id: int, handle: str) -> GenerateRequest:
        spans = [EmbeddingSpan(2, 2, bytes(32), handle)]  # behind the token that names the behaviour
        message: GenerateRequest = behaving(id, SLEEP, max_tokens=100)
        return msgspec.structs.replace(message, spans=spans)

    with running(paths, neighbours, InProcessWorker(ScriptedRunner()), limits=limits, spans=links):
        handle = files.write(bytes(32))
        neighbours.router.send(asked(0, handle))
        neighbours.item(0, final=False)
        files.remove(handle)
        (own,) = paths.spans.iterdir()
        assert own.name != handle
        neighbours.router.send(asked(1, handle))
        error = neighbours.next(RequestError)
        assert (error.id, error.status) == (1, 500)
        neighbours.router.send(Abort(0))
        neighbours.report(num_running=0, aborts=1)
        deadline = time.monotonic() + 60
        while own.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not list(paths.spans.iterdir())
