"""Translates a GrammarSpec to llguidance's notation."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

import llguidance

from .errors import GrammarError
from .json_schema.enforced import MAX_BOUNDED, enforced
from .lark_text import literal, pieces
from .sections import SectionRules
from .spec import (
    AnswerSpec,
    CallForm,
    Channels,
    Choice,
    Ebnf,
    GrammarSpec,
    GrammarTool,
    JsonOrToolCalls,
    JsonSchema,
    Messages,
    Regex,
    Sections,
    TextWithToolCalls,
    ToolCalls,
)
from .tagged_calls import tagged_tools, with_whole_calls

_ANYTHING: Final = "/(?s:.*)/"
_NUMBER: Final = "/:[0-9]{1,4}/"  # number of a call
_CALL_ID: Final = "/[a-z0-9]{10}/"  # Solar Open's


def to_grammar(spec: GrammarSpec) -> str:
    """Returns the grammar text for `engine.GrammarEngine.matcher`. Raises GrammarError if the spec cannot be
    translated; most mistakes are found only when the grammar is compiled."""
    match spec:
        case JsonSchema(schema=schema):
            return f'{{"grammars": [{{"json_schema": {enforced(schema)}}}]}}'
        case Regex(pattern=pattern):
            return llguidance.LLMatcher.grammar_from_regex(pattern)
        case Ebnf(text=text):
            return _lark(text)
        case Choice(options=options):
            return "start: " + " | ".join(map(literal, options))
        case ToolCalls(tools=tools, parallel=parallel, form=form):
            return f"start: calls\n{_calls(form, parallel)}{_tools(tools, form)}"
        case TextWithToolCalls(tools=tools, parallel=parallel, form=form):
            start = "start: among_text* TEXT\n" if parallel else "start: TEXT | among_text\n"
            rules = _block(form, parallel) + _among_text(form) + _tools(tools, form)
            return f"{start}TEXT: {_ANYTHING}\n{rules}"
        case JsonOrToolCalls(schema=schema, tools=tools, parallel=parallel, form=form):
            answer = f"answer: %json {enforced(schema)}\n"
            return f"start: answer | calls\n{answer}{_calls(form, parallel)}{_tools(tools, form)}"
        case Channels():
            return _channels(spec)
        case Messages():
            return _messages(spec)
        case Sections():
            answer_rule = None if spec.answer is None else "@answer"
            return _with_answer(SectionRules(spec, answer_rule).lines(), spec.answer)


def _calls(form: CallForm, parallel: bool) -> str:
    """Returns the rules for an answer of calls only."""
    block = f"{pieces([form.open])} block"
    further = f" ({pieces(form.separator)} {block})*" if parallel and not form.is_block else ""
    return f"calls: {block}{further}\n{_block(form, parallel)}"


def _block(form: CallForm, parallel: bool) -> str:
    """Returns the rule for the part after `form.open`."""
    further = f" ({pieces(form.separator)} call)*" if parallel and form.is_block else ""
    return f"block: call{further} {pieces(with_whole_calls(form).close)}\n"


def _among_text(form: CallForm) -> str:
    """Returns the rules for free text followed by a block of calls. The text ends at the first `form.open`."""
    if isinstance(form.open, int):
        return f"among_text: TEXT {pieces([form.open])} block\n"
    return f"among_text: opening block\nopening[lazy]: /(?s:.*){re.escape(form.open)}/\n"


def _lark(text: str) -> str:
    """Translates GBNF to Lark. Any exception of the parser is reported as a GrammarError, because on text that is not
    GBNF it may fail in any way."""
    if "::=" not in text:
        return text
    try:
        return llguidance.grammar_from("gbnf", text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from error


def _channels(spec: Channels) -> str:
    """Returns the grammar of the text after `<|start|>assistant`."""
    tokens = {name: f"<[{token_id}]>" for name, token_id in spec.tokens.items()}
    channel, message = tokens["<|channel|>"], tokens["<|message|>"]
    again = f'{tokens["<|end|>"]} {tokens["<|start|>"]} "assistant"'
    json_follows = f'" " {tokens["<|constrain|>"]} "json"'
    bound = f"[max_tokens={spec.max_reasoning}]" if spec.max_reasoning else ""
    lines = [
        f"start: {_before_the_end(spec)} {'call' if spec.must_call else '(final | call)' if spec.tools else 'final'}",
        f'reasoning: {channel} "analysis" {message} reasoning_text {again}',
        f"reasoning_text{bound}: {_ANYTHING}",
        f'before: {channel} "commentary" {message} TEXT {again}',
        f'final: {channel} "final" ({json_follows})? {message} {"TEXT" if spec.answer is None else "@answer"}',
        f"TEXT: {_ANYTHING}",
    ]
    if spec.tools:
        lines.append("call: " + " | ".join(f"tool_{i}" for i in range(len(spec.tools))))
    arguments, rules = _argument_rules(spec.tools)
    for i, tool in enumerate(spec.tools):
        recipient = literal(f"commentary to=functions.{tool.name}")
        lines.append(f"tool_{i}: {channel} {recipient} {json_follows} {message} {arguments[i]}")
    lines += rules
    return _with_answer(lines, spec.answer)


def _messages(spec: Messages) -> str:
    """Returns the grammar of the text after `<|begin|>assistant`, and after `<|think|>` if the prompt has it."""
    tokens = {name: f"<[{token_id}]>" for name, token_id in spec.tokens.items()}
    again = f'{tokens["<|end|>"]} {tokens["<|begin|>"]} "assistant"'
    most = spec.max_reasoning
    if spec.begun == "think":
        begin = again if most == 0 else f"reasoning_text {again}"
    else:
        begin = "" if most == 0 else "reasoning?"
    last = "final"
    if spec.tools:
        begin += " before?"
        last = "calls" if spec.must_call else "(final | calls)"
    lines = [
        f"start: {begin} {last}",
        f"reasoning: {tokens['<|think|>']} reasoning_text {again}",
        f"reasoning_text{f'[max_tokens={most}]' if most else ''}: {_ANYTHING}",
        f"before: {tokens['<|content|>']} TEXT {again}",
        f"final: {tokens['<|content|>']} {'TEXT' if spec.answer is None else '@answer'}",
        f"TEXT: {_ANYTHING}",
    ]
    if spec.tools:
        lines.append(f"calls: {tokens['<|tool_calls|>']} call{'+' if spec.parallel else ''}")
        lines.append("call: " + " | ".join(f"tool_{i}" for i in range(len(spec.tools))))
        lines.append(f"CALL_ID: {_CALL_ID}")
    arguments, rules = _argument_rules(spec.tools)
    opening, name = f"{tokens['<|tool_call:begin|>']} CALL_ID", tokens["<|tool_call:name|>"]
    between, close = tokens["<|tool_call:args|>"], tokens["<|tool_call:end|>"]
    for i, tool in enumerate(spec.tools):
        lines.append(f"tool_{i}: {opening} {name} {literal(tool.name)} {between} {arguments[i]} {close}")
    return _with_answer([*lines, *rules], spec.answer)


def _with_answer(lines: Sequence[str], answer: AnswerSpec | None) -> str:
    """Returns the grammar of these rules, with the grammar `@answer` of a client's answer beside them."""
    grammars = [{"lark_grammar": "\n".join(lines)}]
    if answer is not None:
        text = to_grammar(answer)
        own = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
        grammars.append(own | {"name": "answer"})
    return json.dumps({"grammars": grammars})


def _before_the_end(spec: Channels) -> str:
    if spec.max_reasoning is None:
        return "(reasoning | before)*" if spec.tools else "reasoning*"
    return ("reasoning? " if spec.max_reasoning else "") + ("before*" if spec.tools else "")


def _tools(tools: Sequence[GrammarTool], form: CallForm) -> str:
    """Returns the rules for one call, one rule per tool."""
    if form.tags is not None:
        return tagged_tools(tools, with_whole_calls(form), form.tags)
    lines = ["call: " + " | ".join(f"tool_{i}" for i in range(len(tools)))]
    arguments, rules = _argument_rules(tools)
    for i, tool in enumerate(tools):
        if form.numbered:
            head = f"{pieces([*form.before_name, tool.name])} NUMBER {pieces(form.before_arguments)}"
        else:
            head = pieces([*form.before_name, tool.name, *form.before_arguments])
        lines.append(f"tool_{i}: {head} {arguments[i]} {pieces(form.behind)}")
    if form.numbered:
        lines.append(f"NUMBER: {_NUMBER}")
    return "\n".join([*lines, *rules]) + "\n"


def _argument_rules(tools: Sequence[GrammarTool]) -> tuple[list[str], list[str]]:
    """Returns the name of each tool's rule for JSON arguments, and the rules. Tools with equal schemas share a rule."""
    names: dict[str, str] = {}
    arguments = [names.setdefault(tool.schema, f"arguments_{len(names)}") for tool in tools]
    is_few = len(names) <= MAX_BOUNDED
    rules = [f"{name}: %json {enforced(schema, bounds_integers=is_few)}" for schema, name in names.items()]
    return arguments, rules
