"""AnswerReading: how the answers to a conversation are read. Each choice has a reader of its own."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.chatformat import solar_open
from moeserve.chatformat.harmony import HarmonyParser
from moeserve.chatformat.kimi_k3 import KimiK3Parser
from moeserve.chatformat.output import AnswerParser, OutputParser
from moeserve.chatformat.reasoning import ReasoningParser
from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.chat.answers import AnswerReader
from moeserve.httpserver.generation.chat.chat_formats import ChatFormats
from moeserve.httpserver.generation.chat.thinking_tokens import ThinkingState
from moeserve.httpserver.generation.request.asked import ChatPrompt, GrammarConstraint


@dataclass(frozen=True, slots=True)
class AnswerReading:
    prompt: ChatPrompt
    formats: ChatFormats
    stop_token_ids: tuple[int, ...]  # the client's stop tokens
    constraint: GrammarConstraint | None = None
    calls_end_reasoning: bool = False  # a call that the grammar enforces ends the reasoning
    thinking: ThinkingState = "closed"  # the state at the prompt's end
    begun: str = ""  # the message or section that the prompt has begun, of gpt-oss, Kimi-K3 or Solar Open

    def reader(self) -> AnswerReader:
        return AnswerReader(
            self._parser(),
            self.prompt.show_reasoning,
            end_tags=self.formats.end_tags,
            stop_token_ids=self.stop_token_ids,
        )

    def _parser(self) -> AnswerParser:
        formats, tools = self.formats, self.prompt.tools
        if formats.channels is not None:
            separates = formats.channels.separates_reasoning and self.prompt.separate_reasoning
            names = {tool.name for tool in tools.callable}
            return HarmonyParser(self.begun, tools.may_call, separates, names)
        if formats.sections is not None:
            separates = formats.sections.separates_reasoning and self.prompt.separate_reasoning
            offered = {tool.name: tool.parameters for tool in tools.callable}
            return KimiK3Parser(self.begun, tools.may_call, separates, offered)
        if formats.solar is not None:
            separates = formats.solar.separates_reasoning and self.prompt.separate_reasoning
            offered = {tool.name: tool.parameters for tool in tools.callable}
            return solar_open.parser(self.begun, tools.may_call, separates, offered)
        reasoning = None
        if formats.thinking is not None and self.thinking != "closed" and self.prompt.separate_reasoning:
            reasoning = ReasoningParser(self.thinking == "open", formats.thinking.tags)
        if not tools.may_call or formats.tools is None:
            return OutputParser(reasoning, None)
        schemas = {tool.name: tool.parameters for tool in tools.tools}
        names = {tool.name for tool in tools.callable}
        if self.constraint is None:
            parser, bare = formats.tools.parser(schemas), formats.tools.bare_calls(names)
            return OutputParser(reasoning, parser, names, bare=bare)
        spec = self.constraint.spec
        in_tags = isinstance(spec, grammar.WithCalls) and spec.form.tags is not None
        calls = formats.tools.parser(schemas, "own" if in_tags else "json")
        named = names if self.calls_end_reasoning else ()
        return OutputParser(reasoning, calls, named, calls_end_reasoning=True)
