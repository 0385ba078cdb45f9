"""The order in which grammars are compiled, with the real engine."""

from __future__ import annotations

import threading

import pytest

from moeserve.grammar.engine import CompiledGrammar, GrammarEngine
from moeserve.grammar.errors import GrammarError
from moeserve.grammar.spec import Choice
from moeserve.grammar.translate import to_grammar
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.worker.constraints.grammar_compiler import GrammarCompiler
from tests.conftest import TINY_MODEL


class Recorder(GrammarEngine):
    def __init__(self) -> None:
        super().__init__(TextTokenizer.from_gguf(open_gguf(TINY_MODEL)))
        self.compiled: list[str] = []

    def compile(self, grammar: str) -> CompiledGrammar:
        self.compiled.append(grammar)
        return super().compile(grammar)


def grammars(name: str, count: int) -> list[str]:
    return [to_grammar(Choice([f"{name} {i}"])) for i in range(count)]


def test_tenants_take_turns() -> None:
    """One asks for sixty, and then another for two and a third for one of the first's: nobody waits for sixty."""
    engine, gate = Recorder(), threading.Event()

    def build() -> GrammarEngine:
        assert gate.wait(60)
        return engine

    compiler = GrammarCompiler(build)
    many, two = grammars("many", 60), grammars("two", 2)
    futures = [compiler.compile(grammar, "greedy") for grammar in many]
    modest = [compiler.compile(grammar, "modest") for grammar in two]
    shared = compiler.compile(many[50], "third")
    assert shared is futures[50]
    gate.set()
    for future in [*modest, shared, *futures]:
        assert future.result(60).matcher() is not None
    assert engine.compiled[:5] == [many[0], two[0], many[50], many[1], two[1]]
    assert sorted(engine.compiled) == sorted([*many, *two]), "each once"
    compiler.close()


def test_a_wrong_grammar_is_an_error_for_all_who_asked() -> None:
    compiler = GrammarCompiler(Recorder)
    for tenant in ("a", "b"):
        with pytest.raises(GrammarError):
            compiler.compile("start: (", tenant).result(60)
    assert compiler.compile(grammars("right", 1)[0], "a").result(60).matcher() is not None
    compiler.close()
