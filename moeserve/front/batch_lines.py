"""FrontLines: the front's interface for `BatchRunner`. A line of a batch goes to the server of the model that the line
names.

Lines lease models after all requests (`line_lease.py`). A line gets a result only when its answer is complete, so a
line whose model must make room, or whose server is lost, is answered again later. A line may be the reason that its
server is lost, so the batch's runner tries it at most MOST_LOSSES times.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import msgspec
import orjson
from yarl import URL

from moeserve.front.instance import ServerInstance
from moeserve.front.line_lease import lease_for_line
from moeserve.front.metrics import FrontMetrics
from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import PooledModel
from moeserve.httpserver.batches.front_lines import PATH, SECRET_HEADER, LineAnswer
from moeserve.httpserver.batches.line_request import Answered, failed, new_request_id
from moeserve.httpserver.batches.runner import MOST_LOSSES, BatchServer
from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.keys import ApiKeys

_LOST: Final = "the model's server has ended"
CAUSE_S: Final = 2.0  # for the cause of a server's end to be known, behind that of its connections
_SENT_BACK: Final = "the model makes room for another"


class FrontLines(BatchServer):
    def __init__(
        self, pool: ModelPool, apis: ApiTable, keys: ApiKeys, metrics: FrontMetrics, most_at_once: int
    ) -> None:
        self.keys = keys
        self.counts = metrics
        self.most_at_once = most_at_once
        self._pool = pool
        self._apis = apis

    @property
    def is_busy(self) -> bool:
        return self._pool.num_running > 0

    @property
    def knows_its_models(self) -> bool:
        return True

    def has_model(self, name: str) -> bool:
        return self._pool.has(name)

    async def answer(self, path: str, body: Mapping[str, Any], tenant: str, owner: str) -> Answered:
        named = body.get("model")
        try:
            # A name that is not a text is left to the first model's server, which refuses it.
            model = self._pool.find(named if isinstance(named, str) and named else None)
            async with lease_for_line(self._pool, model) as instance:
                assert isinstance(instance, ServerInstance)
                url = URL(f"http://localhost{PATH}").with_query(path=path, tenant=tenant, owner=owner)
                return await _unless_sent_back(model, _ask(instance, url, orjson.dumps(body)))
        except _Lost as lost:
            message = (
                f"the model's server was lost {MOST_LOSSES} times over this request; the last time: {lost}"
            )
            error = ApiError(500, message, code="model_lost")
            answered = failed(self._apis.error_body, path, error, new_request_id())
            return dataclasses.replace(answered, is_lost=True)
        except ApiError as error:
            return failed(self._apis.error_body, path, error, new_request_id())


class _Lost(Exception):
    """The server has ended while it had the line; the message is the cause."""


async def _ask(instance: ServerInstance, url: URL, body: bytes) -> Answered:
    """Raises ApiError 503 if the server cannot answer now; _Lost."""
    if instance.session.closed:  # the server has ended since the lease began
        raise ApiError(503, _LOST)
    headers = {SECRET_HEADER: instance.secret, "content-type": "application/json"}
    try:
        async with instance.session.post(url, data=body, headers=headers) as answer:
            said = await answer.read()
            if answer.status != 200:
                raise ApiError(503, f"the model's server refused a line with a {answer.status}")
        return msgspec.json.decode(said, type=LineAnswer).as_answered()
    except aiohttp.ClientConnectorError as error:
        raise ApiError(503, f"{_LOST}: {error}") from error
    except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
        cause = str(error)
        with contextlib.suppress(TimeoutError):
            cause = await asyncio.wait_for(instance.until_ended(), CAUSE_S)
        raise _Lost(cause) from error


async def _unless_sent_back(model: PooledModel, asking: Any) -> Answered:
    """Raises ApiError 503 if the model must make room first."""
    working = asyncio.ensure_future(asking)
    leaving = asyncio.ensure_future(model.sends_lines_back.wait())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            answered: Answered = working.result()
            return answered
        raise ApiError(503, _SENT_BACK)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))
