"""Lines over which their model's server ends, across restarts of ours. Without processes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeserve.front.batch_lines import FrontLines
from moeserve.front.metrics import FrontMetrics
from moeserve.front.pool import ModelPool
from moeserve.httpserver.app import APIS
from moeserve.httpserver.batches.batch_in_progress import BatchInProgress
from moeserve.httpserver.batches.line_request import Answered, failed
from moeserve.httpserver.batches.records import Batch, Style, new_id
from moeserve.httpserver.batches.runner import MOST_LOSSES, BatchRunner, BatchServer
from moeserve.httpserver.batches.store import BatchStore
from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.keys import ApiKeys
from tests.support.front.scripted_models import Script, pool_of
from tests.support.front.socket_models import Life, socket_pool
from tests.support.router.virtual_time import Clock

MANY = 24
AT_ONCE = 8
ENDPOINTS: dict[Style, str] = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}


class Mortal(BatchServer):
    """Ends over each line whose text is "poison", with all lines that it has then."""

    def __init__(self, pool: ModelPool, directory: Path) -> None:
        self.keys = None
        self.counts = FrontMetrics(pool, directory)
        self.most_at_once = AT_ONCE
        self.ended_over: list[int] = []  # how many lines it had at each end
        self._apis = ApiTable(APIS)
        self._lines: set[asyncio.Future[bool]] = set()

    @property
    def is_busy(self) -> bool:
        return False

    @property
    def knows_its_models(self) -> bool:
        return True

    def has_model(self, name: str) -> bool:
        return True

    async def answer(self, path: str, body: Mapping[str, Any], tenant: str, owner: str) -> Answered:
        text = body["messages"][0]["content"]
        mine = asyncio.get_running_loop().create_future()
        self._lines.add(mine)
        try:
            async with asyncio.timeout(0.005 if text == "poison" else 0.02):
                await mine
        except TimeoutError:
            if text != "poison":
                return Answered(200, b'{"ok": 1}', "req_1")
            self.ended_over.append(len(self._lines))
            for other in self._lines:
                if not other.done():
                    other.set_result(True)
        finally:
            self._lines.discard(mine)
        error = ApiError(500, "the model's server was lost: signal 9, Killed", code="model_lost")
        return replace(failed(self._apis.error_body, path, error, "req_1"), is_lost=True)


def new_batch(store: BatchStore, style: Style) -> Batch:
    name = new_id("file-")
    texts = ["poison", *(f"good {place}" for place in range(MANY))]
    lines = [
        {
            "custom_id": text,
            "url": ENDPOINTS[style],
            "body": {"messages": [{"role": "user", "content": text}]},
        }
        for text in texts
    ]
    (store.folder.path / "files" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Batch(
        id=new_id("batch_" if style == "openai" else "msgbatch_"),
        owner="",
        style=style,
        endpoint=ENDPOINTS[style],
        requests=f"files/{name}",
        created_at=int(time.time()),
        expires_at=int(time.time()) + 86400,
        output_file_id=new_id("file-"),
        error_file_id=new_id("file-"),
    )


async def worked_on(folder: Path, server: Mortal, style: Style, *, until_loss: int | None) -> Batch:
    """Works on the folder's batch as one server of ours, until it has ended or a model's server did so often."""
    store = BatchStore(folder, 1 << 30)
    runner = asyncio.create_task(BatchRunner(server, store).run())
    while not store.is_open:
        await asyncio.sleep(0.005)
    if not store.batches:
        await store.save(new_batch(store, style))
        store.changed()
    (batch,) = store.batches.values()
    while not batch.is_ended and (until_loss is None or batch.losses.get("poison", 0) < until_loss):
        assert not runner.done(), runner.result()
        await asyncio.sleep(0.005)
    runner.cancel()
    await asyncio.wait((runner,))
    return batch


@pytest.mark.parametrize("style", ["openai", "anthropic"])
def test_the_line_that_ends_servers_fails_and_the_others_do_not(tmp_path: Path, style: Style) -> None:
    pool, _ = pool_of(Clock(), 1, a=Script())
    server = Mortal(pool, tmp_path)

    async def work() -> Batch:
        await worked_on(tmp_path, server, style, until_loss=1)
        await worked_on(tmp_path, server, style, until_loss=2)
        return await worked_on(tmp_path, server, style, until_loss=None)

    batch = asyncio.run(asyncio.wait_for(work(), 60))
    assert batch.status == "completed"
    assert batch.counts == {"succeeded": MANY, "errored": 1}
    assert len(server.ended_over) == MOST_LOSSES, "counted across our restarts"
    assert server.ended_over[0] > 1, "the first end takes others along, else this shows nothing"
    file = tmp_path / (batch.error_output if style == "openai" else batch.output)
    lines = {line["custom_id"]: line for line in map(json.loads, file.read_text().splitlines())}
    if style == "openai":
        assert lines["poison"]["response"]["status_code"] == 500
        assert "signal 9" in lines["poison"]["response"]["body"]["error"]["message"]
    else:
        assert lines["poison"]["result"]["type"] == "errored"
        assert "signal 9" in lines["poison"]["result"]["error"]["error"]["message"]
    assert batch.losses == {}


def test_losses_are_counted_on_the_disk(tmp_path: Path) -> None:
    async def work() -> int:
        store = BatchStore(tmp_path, 1 << 30)
        assert store.open()
        await store.save(new_batch(store, "openai"))
        (batch,) = store.batches.values()
        running = await BatchInProgress.begin(store, batch, lambda name: True)
        assert running is not None
        lines = list(iter(running.take, None))
        await asyncio.gather(*(running.add_loss(line) for line in lines for _ in range(2)))
        await running.close()
        store.close()
        again = BatchStore(tmp_path, 1 << 30)
        assert again.open()
        (found,) = again.batches.values()
        again.close()
        assert set(found.losses.values()) == {2}
        return len(found.losses)

    assert asyncio.run(work()) == MANY + 1


def test_the_front_tells_a_loss_from_a_server_that_was_not_reached(tmp_path: Path) -> None:
    async def ask(*lives: Life) -> Answered:
        pool, world = socket_pool(tmp_path, *lives)
        try:
            lines = FrontLines(pool, ApiTable(APIS), ApiKeys({}), FrontMetrics(pool, tmp_path), 1)
            asking = asyncio.create_task(lines.answer("/v1/messages", {"model": "a"}, "", ""))
            if lives[0].is_unreachable:
                await asyncio.sleep(0.05)
                world.started[0].die()
            return await asking
        finally:
            await pool.close()

    lost = asyncio.run(ask(Life()))
    assert lost.is_lost
    assert f"lost {MOST_LOSSES} times over this request; the last time: signal 9" in lost.body.decode()
    missed = asyncio.run(ask(Life(is_unreachable=True)))
    assert not missed.is_lost
    assert missed.retry_after is not None, "the line is tried again, however often"
