"""The table of the tool-call formats. gpt-oss's, Kimi-K3's and Solar Open's are not in it, because they
cover whole answers (`harmony.py`, `kimi_k3.py`, `solar_open.py`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from . import (
    cohere,
    deepseek,
    dsml,
    gemma,
    glm,
    harmony,
    hermes,
    hunyuan3,
    json_lists,
    kimi,
    minimax,
    minimax_m3,
    mistral,
    python_calls,
    qwen3_coder,
    section_tags,
    seed,
    solar_open,
)
from .bare_calls import BareCalls
from .either_body import EitherBody
from .guided import GuidedCalls, hermes_between
from .separated import SeparatedBody, SeparatedSyntax
from .tagged import TaggedBody
from .tool_calls import CallBody, CallTags, ToolCallParser
from .value_end import TaggedSyntax
from .values import Schemas

NewBody = Callable[[int], CallBody]  # makes the reader of a call from the call's index


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format in which a model writes tool calls."""

    name: str  # a value of --tool-call-parser
    marks: tuple[str, ...]  # a chat template with all of these texts has this format
    tags: CallTags
    call_end: str  # the tag that ends one call
    body: Callable[
        [Schemas, bool], NewBody
    ]  # makes a body maker from the tools' schemas and whether a grammar enforces `own_calls`
    guided: GuidedCalls  # the form of calls in JSON that a grammar enforces
    guided_body: NewBody | None = None  # makes readers of `guided` calls; None: as `body`
    takes_text_arguments: bool = False  # the chat templates take a call's arguments as text, not as an object
    inner_words: tuple[str, ...] = ()  # tags within `tags`
    opening: str = ""  # a token that occurs only in the opening tag; "": the whole tag is such a token
    # Makes a call's id from its tool's name and its number in the conversation; None: the client's id is used.
    call_id: Callable[[str, int], str] | None = None
    in_json: bool = False  # a call is a JSON object with name and arguments
    # The form with the model's own tags around arguments; `body` reads it.
    own_calls: GuidedCalls | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Returns all tags of the format. Some models have them as control tokens."""
        every = (*self.tags.openings, self.tags.close, *self.tags.ends, *self.inner_words)
        return tuple(word for word in dict.fromkeys(every) if word)

    def bare_calls(self, offered: Collection[str]) -> BareCalls | None:
        """Returns a reader of calls without the tags, of the offered tools; None if other text could be mistaken for
        such calls."""
        return BareCalls(offered, self.tags) if self.in_json and offered else None

    def parser(self, schemas: Schemas, guided: Literal["", "json", "own"] = "") -> ToolCallParser:
        """Returns a parser of calls. guided: "json" or "own" if a grammar enforces calls in the form `guided` or
        `own_calls`."""
        if guided == "json" and self.guided_body is not None:
            return ToolCallParser(self.guided_body, CallTags(self.tags.open, self.tags.close), schemas)
        return ToolCallParser(self.body(schemas, guided == "own"), self.tags, schemas)


def _tagged(
    name: str, marks: tuple[str, ...], tags: CallTags, syntax: TaggedSyntax, own_calls: GuidedCalls
) -> ToolFormat:
    call_end = syntax.close if tags.following else tags.close

    def body(schemas: Schemas, is_guided: bool) -> NewBody:
        tagged: NewBody = partial(TaggedBody, schemas=schemas, syntax=syntax, tags=tags, is_guided=is_guided)
        if is_guided:
            return tagged
        if not syntax.name_open:
            tagged = _or_function_tags(schemas, tags, tagged)
        return partial(EitherBody, tagged=tagged, in_json=partial(hermes.HermesBody, tags=tags))

    guided = hermes_between(tags)
    return ToolFormat(name, marks, tags, call_end, body, guided, hermes.HermesBody, own_calls=own_calls)


def _or_function_tags(schemas: Schemas, tags: CallTags, body: NewBody) -> NewBody:
    """Returns a body maker that reads Qwen3-Coder's tags too. Models of formats with the same outer tags write them:
    Qwen3's for one, which were trained on both."""
    in_tags = partial(TaggedBody, schemas=schemas, syntax=qwen3_coder.SYNTAX, tags=tags)
    return partial(EitherBody, tagged=body, in_json=in_tags, begins_json="<")


def _hunyuan3(name: str, marks: tuple[str, ...], suffix: str) -> ToolFormat:
    return _tagged(name, marks, hunyuan3.tags(suffix), hunyuan3.syntax(suffix), hunyuan3.own_calls(suffix))


def _dsml(name: str, block: str) -> ToolFormat:
    tags = dsml.tags(block)

    def body(schemas: Schemas, is_guided: bool) -> NewBody:
        tagged = partial(TaggedBody, schemas=schemas, syntax=dsml.SYNTAX, tags=tags, is_guided=is_guided)
        in_json = partial(hermes.HermesBody, tags=tags)
        return tagged if is_guided else partial(EitherBody, tagged=tagged, in_json=in_json)

    # The templates concatenate a tag from parts.
    marks = (dsml.MARK, f"{block}>")
    return ToolFormat(
        name,
        marks,
        tags,
        dsml.SYNTAX.close,
        body,
        dsml.guided(block),
        inner_words=(dsml.MARK,),
        opening=dsml.MARK,
        own_calls=dsml.own_calls(block),
    )


def _minimax_m3(schemas: Schemas, is_guided: bool) -> NewBody:
    tagged = partial(minimax_m3.MiniMaxM3Body, schemas=schemas)
    return partial(EitherBody, tagged=tagged, in_json=partial(hermes.HermesBody, tags=minimax_m3.TAGS))


def _untyped(body: NewBody) -> Callable[[Schemas, bool], NewBody]:
    """Returns a body maker that ignores the schemas. JSON arguments need no schema to have types."""
    return lambda schemas, is_guided: body


def _separated(
    name: str,
    marks: tuple[str, ...],
    tags: CallTags,
    syntax: SeparatedSyntax,
    guided: GuidedCalls,
    *,
    takes_text_arguments: bool = False,
    call_id: Callable[[str, int], str] | None = None,
) -> ToolFormat:
    return ToolFormat(
        name,
        marks,
        tags,
        syntax.close,
        _untyped(partial(SeparatedBody, syntax=syntax)),
        guided,
        takes_text_arguments=takes_text_arguments,
        inner_words=(syntax.open, syntax.separator, syntax.close),
        call_id=call_id,
    )


def _in_json(name: str, marks: tuple[str, ...], tags: CallTags, guided: GuidedCalls) -> ToolFormat:
    body = _untyped(partial(hermes.HermesBody, tags=tags, needs_arguments=bool(tags.bare)))
    return ToolFormat(name, marks, tags, tags.close, body, guided, in_json=True)


def _python(name: str, mark: str) -> ToolFormat:
    body = partial(
        EitherBody,
        tagged=python_calls.PythonBody,
        in_json=partial(hermes.HermesBody, tags=python_calls.TAGS),
        before=python_calls.LIST,
    )
    tags = python_calls.TAGS
    return ToolFormat(name, (mark,), tags, tags.close, _untyped(body), python_calls.GUIDED)


def _mistral(name: str, marks: tuple[str, ...], guided: GuidedCalls) -> ToolFormat:
    body = partial(
        EitherBody,
        tagged=partial(SeparatedBody, syntax=mistral.SYNTAX),
        in_json=partial(hermes.HermesBody, tags=mistral.TAGS),
        begins_json="[{,",
    )
    words = (mistral.SEPARATOR, mistral.CALL_ID)
    return ToolFormat(
        name,
        marks,
        mistral.TAGS,
        "",
        _untyped(body),
        guided,
        inner_words=words,
        call_id=mistral.call_id,
        in_json=guided is mistral.GUIDED_LIST,
    )


_ALL: Final = (  # a template with the marks of several formats gets the first of these formats
    _dsml("deepseek_v4", "tool_calls"),
    _dsml("deepseek_v32", "function_calls"),
    ToolFormat(
        "cohere",
        (cohere.TAGS.open,),
        cohere.TAGS,
        cohere.TAGS.close,
        _untyped(partial(hermes.HermesBody, tags=cohere.TAGS)),
        cohere.GUIDED,
        call_id=cohere.call_id,
    ),
    _separated(
        "deepseek_v3",
        (deepseek.CALL_OPEN, deepseek.FENCE),
        deepseek.TAGS,
        deepseek.SYNTAX,
        deepseek.GUIDED_V3,
        takes_text_arguments=True,
    ),
    _separated(
        "deepseek_v31",
        (deepseek.CALL_OPEN,),
        deepseek.TAGS,
        deepseek.SYNTAX,
        deepseek.GUIDED,
        takes_text_arguments=True,
    ),
    _separated("kimi_k2", (kimi.CALL_OPEN,), kimi.TAGS, kimi.SYNTAX, kimi.GUIDED, call_id=kimi.call_id),
    ToolFormat(
        "gemma4",
        (gemma.TAGS.open,),
        gemma.TAGS,
        gemma.TAGS.close,
        _untyped(
            partial(EitherBody, tagged=gemma.GemmaBody, in_json=partial(hermes.HermesBody, tags=gemma.TAGS))
        ),
        gemma.GUIDED,
        guided_body=hermes.HermesBody,
        inner_words=(gemma.QUOTE,),
    ),
    ToolFormat(
        "minimax_m3",
        (minimax_m3.MARK,),
        minimax_m3.TAGS,
        f"{minimax_m3.MARK}</invoke>",
        _minimax_m3,
        minimax_m3.GUIDED,
        guided_body=hermes.HermesBody,
        inner_words=(minimax_m3.MARK,),
        opening=minimax_m3.MARK,
    ),
    _tagged("minimax_m2", (minimax.TAGS.open,), minimax.TAGS, minimax.SYNTAX, minimax.OWN_CALLS),
    _hunyuan3("hy_v3", ("<tool_sep", hunyuan3.SUFFIX), hunyuan3.SUFFIX),
    _hunyuan3("hy_v3_preview", ("<tool_sep>", "<tool_calls>", "<arg_key>"), ""),
    _tagged("glm45", (glm.SYNTAX.key_open,), glm.TAGS, glm.SYNTAX, glm.OWN_CALLS),
    _tagged("seed_oss", (seed.TAGS.open,), seed.TAGS, seed.SYNTAX, seed.OWN_CALLS),
    _tagged(
        "qwen3_coder",
        (qwen3_coder.TAGS.bare,),
        qwen3_coder.TAGS,
        qwen3_coder.SYNTAX,
        qwen3_coder.OWN_CALLS,
    ),
    _in_json("hunyuan", (json_lists.HUNYUAN.open,), json_lists.HUNYUAN, json_lists.HUNYUAN_GUIDED),
    _in_json("nemotron", (json_lists.NEMOTRON.open,), json_lists.NEMOTRON, json_lists.NEMOTRON_GUIDED),
    _in_json("phi4_mini", json_lists.PHI4_MARKS, json_lists.PHI4, json_lists.PHI4_GUIDED),
    _in_json("granite", (json_lists.GRANITE.open,), json_lists.GRANITE, json_lists.GRANITE_GUIDED),
    _mistral("mistral", (mistral.OPEN, mistral.SEPARATOR), mistral.GUIDED),
    _mistral("mistral_json", (mistral.OPEN,), mistral.GUIDED_LIST),
    _in_json("llama", (json_lists.LLAMA_MARK,), json_lists.LLAMA, json_lists.LLAMA_GUIDED),
    _python("lfm2", python_calls.MARK),
    ToolFormat(
        "hermes",
        (hermes.TAGS.open,),
        hermes.TAGS,
        hermes.TAGS.close,
        lambda schemas, is_guided: _or_function_tags(schemas, hermes.TAGS, hermes.HermesBody),
        hermes_between(hermes.TAGS),
        guided_body=hermes.HermesBody,
        in_json=True,
    ),
)
TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {one.name: one for one in _ALL}


def tool_format(template: str) -> ToolFormat | None:
    """Returns the format of calls that a chat template asks for; None if it asks for none or an unknown one."""
    return next((one for one in _ALL if all(mark in template for mark in one.marks)), None)


def is_harmony(template: str) -> bool:
    """Returns whether a chat template is gpt-oss's: reasoning and calls are messages in channels."""
    return harmony.CHANNEL in template and harmony.MESSAGE in template


def has_sections(template: str) -> bool:
    """Returns whether a chat template is Kimi-K3's: reasoning, text and calls are sections between tags."""
    return all(word in template for word in section_tags.WORDS)


def is_solar_open(template: str) -> bool:
    """Returns whether a chat template is Solar Open's: reasoning, text and calls are messages."""
    return solar_open.CALL_ARGS in template and solar_open.THINK in template
