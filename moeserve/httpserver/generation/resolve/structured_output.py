"""Compiles the grammar of a constrained answer to check it; the worker compiles it again."""

from __future__ import annotations

import logging
from functools import lru_cache

from moeserve.grammar.checker import GrammarChecker
from moeserve.grammar.errors import GrammarError
from moeserve.grammar.relax import relaxed
from moeserve.httpserver.generation.request.asked import Asked, GrammarConstraint
from moeserve.httpserver.generation.request.tool_use import ToolUse
from moeserve.httpserver.transport.errors import ApiError, invalid
from moeserve.httpserver.transport.request_state import RELAXED_SCHEMAS

log = logging.getLogger(__name__)


async def compile_grammar(
    grammars: GrammarChecker, asked: Asked, constraint: GrammarConstraint, tools: ToolUse
) -> str:
    """Returns the constraint's grammar. Raises ApiError 400 for a grammar that does not compile, and for fields that
    conflict with the grammar's own end of the answer."""
    if asked.ignore_eos:
        raise invalid(
            "ignore_eos",
            f"cannot be combined with {constraint.param}: the grammar ends the answer",
        )
    if asked.min_tokens > 0:
        raise invalid(
            "min_tokens", f"cannot be combined with {constraint.param}: its grammar sets the length"
        )
    strict = {tool.name for tool in tools.tools if tool.is_strict}
    try:
        grammar, lost = await grammars.check_or(
            constraint.spec,
            relaxed(constraint.spec, strict, answer=constraint.is_lenient),
            asked.caller.tenant,
        )
        if lost is not None:
            asked.caller.notes[RELAXED_SCHEMAS] = constraint.param
            _tell_once(f"{constraint.param}: held to what a grammar can express of its schema: {lost}")
        return grammar
    except GrammarError as error:
        message = f"{constraint.param}: {error}"
        raise ApiError(400, message, param=constraint.param, code="invalid_grammar") from error


@lru_cache(256)
def _tell_once(message: str) -> None:
    """Logs a message once: agents send the same tools with every request."""
    log.warning("%s", message)
