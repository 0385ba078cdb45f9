"""httpserver's side of the check: turns a GrammarSpec into the grammar that the worker may compile, or into the reason
for refusing it, within seconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from moeserve.processes.sandbox.parent import (
    Sandbox,
    SandboxDied,
    SandboxLost,
    SandboxTimeout,
    SandboxUnavailable,
)

from .check_budget import CheckBudget
from .check_protocol import MAX_GRAMMAR_BYTES, MAX_REQUEST_BYTES, Accepted, Refused, decode_reply, encode
from .errors import GrammarError
from .spec import GrammarSpec

TIMEOUT_S: Final = 2.0  # limit of CPU time: MAX_CPU_S for compiling, and llguidance's other work
# Size of the cache of accepted specs and their grammars: agents send the same spec with every request.
CACHE_BYTES: Final = 16 << 20


class _Passed(NamedTuple):
    grammar: str
    lost: str | None = None  # why the requested grammar was replaced by this one


class GrammarChecker:
    """Owns one checking process, which starts with the first spec (1 s for a vocabulary of 151,936) and checks one spec
    at a time. Tenants take turns, each with a budget (`check_budget.py`)."""

    def __init__(
        self,
        model: Path,
        *,
        timeout: float = TIMEOUT_S,
        serves_others: Callable[[str], bool] = lambda tenant: False,
    ) -> None:
        """serves_others: takes a tenant, returns whether other tenants' answers are in progress."""
        self._budget = CheckBudget(serves_others)
        self._sandbox = Sandbox(
            "moeserve.grammar.check_process",
            "grammars",
            timeout=timeout,
            max_reply_bytes=MAX_GRAMMAR_BYTES,
            arguments=[str(model)],
        )
        self._passed: OrderedDict[bytes, _Passed] = OrderedDict()
        self._passed_bytes = 0

    async def check(self, spec: GrammarSpec, tenant: str = "") -> str:
        """Returns the spec's grammar after compiling it once. Raises GrammarError, whose text is for the client, and
        SandboxUnavailable for failures that the grammar did not cause."""
        return (await self._answer(spec, tenant)).grammar

    async def check_or(
        self, spec: GrammarSpec, instead: GrammarSpec | None, tenant: str = ""
    ) -> tuple[str, str | None]:
        """Checks `spec` as `check` does, and tries `instead` if `spec` is refused. Returns the grammar and, if it is
        `instead`'s, why `spec` was refused. Raises as `check`; if both are refused, the error of `instead`."""
        if instead is None:
            return await self.check(spec, tenant), None
        key = b"or else ".join((self._frame(spec), self._frame(instead)))
        passed = self._passed.get(key)
        if passed is None:
            try:
                passed = await self._answer(spec, tenant)
            except GrammarError as error:
                passed = _Passed((await self._answer(instead, tenant)).grammar, str(error))
            self._remember(key, passed)
        return passed.grammar, passed.lost

    async def _answer(self, spec: GrammarSpec, tenant: str) -> _Passed:
        frame = self._frame(spec)
        passed = self._passed.get(frame)
        if passed is None:
            async with self._budget.turn(tenant, lambda: self._sandbox.cpu_seconds):
                passed = _Passed(await self._sandbox.run(lambda: self._ask(frame), tenant))
            self._remember(frame, passed)
        else:
            self._passed.move_to_end(frame)
        return passed

    def _frame(self, spec: GrammarSpec) -> bytes:
        frame = encode(spec)
        if len(frame) > MAX_REQUEST_BYTES:
            raise GrammarError(f"takes {len(frame)} bytes; {MAX_REQUEST_BYTES} at most are supported")
        return frame

    def close(self) -> None:
        self._sandbox.close()

    def _ask(self, frame: bytes) -> str:
        """If the checking process is lost, asks a second one: the first may have been killed for another reason than
        this spec."""
        try:
            reply = decode_reply(self._sandbox.ask_or_ask_another(frame, "compile"))
        except SandboxTimeout as error:
            raise GrammarError(f"is too complex: it {error}; split it, or shorten its repetitions") from error
        except (SandboxDied, ValueError) as error:
            self._sandbox.stop()
            raise GrammarError(
                "is too complex: compiling it takes too much memory; split it, or shorten its repetitions"
            ) from error
        except SandboxLost as error:
            raise SandboxUnavailable(f"the process for grammars {error}") from error
        match reply:
            case Refused(message=message):
                raise GrammarError(message)
            case Accepted(grammar=grammar):
                return grammar

    def _remember(self, frame: bytes, passed: _Passed) -> None:
        if frame in self._passed:
            return  # another call has stored it meanwhile
        self._passed[frame] = passed
        self._passed_bytes += len(frame) + len(passed.grammar)
        while self._passed_bytes > CACHE_BYTES:
            old, dropped = self._passed.popitem(last=False)
            self._passed_bytes -= len(old) + len(dropped.grammar)
