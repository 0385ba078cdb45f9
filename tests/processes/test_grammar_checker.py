"""The process that checks grammars: killed, stopped, or ended by a grammar that is too much for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import psutil
import pytest

from moeserve.grammar.checker import GrammarChecker
from moeserve.grammar.engine import GrammarEngine
from moeserve.grammar.errors import GrammarError
from moeserve.grammar.spec import ANY_OBJECT, Ebnf, GrammarSpec, JsonSchema, Regex
from moeserve.grammar.translate import to_grammar
from moeserve.messages.sampling import SamplingParams
from moeserve.models.sources.gguf import open_gguf
from moeserve.processes.sandbox import parent
from moeserve.processes.sandbox.parent import SandboxUnavailable
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.worker.constraints.slot_guides import Constraints
from tests.conftest import TINY_MODEL
from tests.support.servers.suspending import suspend


def check(checker: GrammarChecker, spec: GrammarSpec) -> str:
    return asyncio.run(checker.check(spec))


def processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [p for p in children if p.status() != "zombie" and p.cmdline()[:1] == ["moeserve: grammar"]]


def test_an_endless_compilation_is_killed_and_the_next_spec_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "PATIENCE", 200)  # it gets its CPU time, however busy the machine is
    others = processes()
    checker = GrammarChecker(TINY_MODEL, timeout=0.3)
    try:
        check(checker, ANY_OBJECT)
        (first,) = set(processes()) - set(others)
        with pytest.raises(GrammarError, match=r"too complex: it did not compile within (0\.3|3) s"):
            check(checker, JsonSchema('{"type": "integer", "multipleOf": 99999989}'))
        assert not first.is_running()
        check(checker, Regex("b+"))
        assert set(processes()) - set(others) != {first}
    finally:
        checker.close()
    assert processes() == others


def test_a_killed_checker_is_replaced_and_nobody_notices() -> None:
    others = processes()
    checker = GrammarChecker(TINY_MODEL)
    try:
        check(checker, ANY_OBJECT)
        (first,) = set(processes()) - set(others)
        first.kill()
        first.wait()
        check(checker, Regex("b+"))
    finally:
        checker.close()


def test_a_stopped_checker_is_replaced_and_its_grammar_is_not_to_blame() -> None:
    others = processes()
    checker = GrammarChecker(TINY_MODEL)
    try:
        check(checker, ANY_OBJECT)
        (first,) = set(processes()) - set(others)
        suspend(first)
        check(checker, Regex("b+"))
        assert not first.is_running()
    finally:
        checker.close()


def test_a_checker_that_cannot_start_is_not_the_grammars_fault(tmp_path: Path) -> None:
    checker = GrammarChecker(tmp_path / "deleted.gguf")
    try:
        with pytest.raises(
            SandboxUnavailable, match=r"the process for grammars ended at once \(exit code 1\)"
        ):
            check(checker, ANY_OBJECT)
    finally:
        checker.close()


def test_rules_that_overflow_the_stack_end_the_checker_alone() -> None:
    """And far more than the checker survives does not end the worker."""

    def chain(rules: int) -> Ebnf:
        lines = [f"r{i}: r{i + 1}\n" for i in range(rules)]
        return Ebnf("start: r0\n" + "".join(lines) + f'r{rules}: "a"\n')

    checker = GrammarChecker(TINY_MODEL)
    try:
        with pytest.raises(GrammarError, match="too complex"):
            check(checker, chain(1500))
        assert check(checker, chain(100))
    finally:
        checker.close()
    tokenizer = TextTokenizer.from_gguf(open_gguf(TINY_MODEL))
    constraints = Constraints(1, lambda: GrammarEngine(tokenizer), compilation_wait=60)
    sampling = SamplingParams(max_tokens=1, grammar=to_grammar(chain(3000)))
    constraints.bind(0, sampling, np.zeros(0, np.int32))
    assert constraints.masks_for(np.zeros(1, np.int32)) is not None
