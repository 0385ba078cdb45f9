r"""The rules file: assigns parts of the model to devices by regular expressions on their names.

    - match: '^blk\.(0|1|2)\.experts'    # a tensor's name, or a module's
      device: cpu                         # stored and computed there
    - match: '\.experts$'
      decode: cpu                         # in RAM; computed by the CPU pool in decode steps
      prefill: cuda                       # streamed to the GPU in every step with prompt tokens

The first rule that matches a name decides; the flags decide for names that no rule matches. The format follows
KTransformers' YAML, with the GGUF's tensor names and these modules:

    token_embd, output          the embedding; the head
    blk.3.dense                 attention, norms, router and KV of layer 3
    blk.3.experts               all experts of layer 3
    blk.3.experts.17            one of them

Patterns are Rust regular expressions and match anywhere in a name. They have no look-around or back-references, so
no pattern takes exponential time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from pydantic_core import SchemaError, SchemaValidator, core_schema

from moeserve.errors import ConfigError
from moeserve.placement.placement import Device

MAX_BYTES = 256 << 10
MAX_RULES = 256
# time limit for matching all names; a rule takes 1 ms for the 7,000 names of a 48-layer model
MAX_MATCH_S = 5.0

Choice = Literal["cpu", "cuda"]


class RuleText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the file."""

    match: Annotated[str, Meta(min_length=1, max_length=512)]
    device: Choice | None = None
    decode: Choice | None = None
    prefill: Choice | None = None

    def __post_init__(self) -> None:
        if self.device is not None and (self.decode is not None or self.prefill is not None):
            raise ValueError("`device` stands for both phases: leave it out, or `decode` and `prefill`")
        if self.device is None and self.decode is None and self.prefill is None:
            raise ValueError("names no device: add `device`, or `decode` and `prefill`")


@dataclass(frozen=True, slots=True)
class Decision:
    """A rule's decision for a part; a None field leaves it to the flags."""

    rule: str  # the rule, as quoted in messages
    device: Device | None
    prefill: Choice | None


class Rules:
    """The rules of one file, applied to one model. Call `decide` for each part, then `check_all_applied`."""

    def __init__(self, path: Path, texts: list[RuleText]) -> None:
        self._path = path
        self._rules = [self._compile(index, text) for index, text in enumerate(texts)]
        self._matched = [False] * len(texts)
        self._applied = [False] * len(texts)
        self._first: dict[str, int | None] = {}  # name → index of the first rule that matches it
        self._seconds = 0.0

    @classmethod
    def read(cls, path: Path) -> Rules:
        """Reads a rules file. Raises ConfigError, which names the file, the rule and the error."""
        from moeserve.placement.strict_yaml import read_yaml  # few servers have rules

        try:
            with open(path, "rb") as file:
                text = file.read(MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise ValueError(f"the file is larger than {MAX_BYTES >> 10} KiB")
            entries = read_yaml(text)
            if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_RULES:
                raise ValueError(f"it must be a list of 1 to {MAX_RULES} rules")
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"--placement-rules {path}: {error}") from error
        return cls(path, [_convert(path, index, entry) for index, entry in enumerate(entries)])

    def decide(self, what: str, tensors: Iterable[str], modules: tuple[str, ...]) -> Decision | None:
        """Returns the decision for one part, whose names are its tensors' and its modules'. Raises ConfigError if
        rules put its tensors on different devices."""
        from_modules = [self._first_match(module) for module in modules]
        by_tensor = {name: _least([self._first_match(name), *from_modules]) for name in tensors}
        for index in by_tensor.values():
            if index is not None:
                self._applied[index] = True
        decisions = {name: self._decision(index) for name, index in by_tensor.items()}
        (first, decision), *others = decisions.items()
        for name, other in others:
            if _says(other) != _says(decision):
                raise self._error(
                    f"{_quote(decision)} decides {first}, {_quote(other)} {name}: {what} can only be placed as a "
                    f"whole; match {modules[-1]!r} instead"
                )
        return decision

    def check_all_applied(self) -> None:
        """Raises ConfigError for a rule that no part uses: its name does not exist, or an earlier rule matches
        first."""
        for index, (_, _, quoted) in enumerate(self._rules):
            if not self._matched[index]:
                raise self._error(f"{quoted} matches nothing in this model; correct or remove it")
            if not self._applied[index]:
                raise self._error(
                    f"{quoted} never applies, because earlier rules match all names that it matches; "
                    "remove it, or move it up"
                )

    def error(self, decision: Decision, problem: str) -> ConfigError:
        return self._error(f"{decision.rule} {problem}")

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"--placement-rules {self._path}: {problem}")

    def _compile(self, index: int, text: RuleText) -> tuple[SchemaValidator, RuleText, str]:
        quoted = _describe(index, text)
        try:
            schema = core_schema.str_schema(pattern=text.match, regex_engine="rust-regex")
            return SchemaValidator(schema), text, quoted
        except SchemaError as error:
            reason = str(error).rpartition("SchemaError: ")[2]
            raise self._error(
                f"{quoted}: the pattern is not valid: {reason}; put a backslash before a character that is meant "
                "literally, and leave out look-around and back-references"
            ) from error

    def _first_match(self, name: str) -> int | None:
        if name not in self._first:
            start = time.perf_counter()
            hits = [i for i, (pattern, _, _) in enumerate(self._rules) if pattern.isinstance_python(name)]
            self._seconds += time.perf_counter() - start
            if self._seconds > MAX_MATCH_S:
                raise self._error(f"matching takes more than {MAX_MATCH_S:g} s; simplify the patterns")
            for index in hits:
                self._matched[index] = True
            self._first[name] = hits[0] if hits else None
        return self._first[name]

    def _decision(self, index: int | None) -> Decision | None:
        if index is None:
            return None
        _, text, quoted = self._rules[index]
        return Decision(quoted, text.device or text.decode, text.prefill)


def _convert(path: Path, index: int, entry: object) -> RuleText:
    try:
        return msgspec.convert(entry, RuleText)
    except msgspec.ValidationError as error:
        shown = str(entry)
        raise ConfigError(f"--placement-rules {path}: rule {index + 1} ({shown[:200]}): {error}") from error


def _describe(index: int, text: RuleText) -> str:
    said = [f"{name}: {value}" for name in ("device", "decode", "prefill") if (value := getattr(text, name))]
    return f"rule {index + 1} (match: {text.match!r}, {', '.join(said)})"


def _quote(decision: Decision | None) -> str:
    return "no rule" if decision is None else decision.rule


def _says(decision: Decision | None) -> tuple[Device | None, Choice | None] | None:
    return None if decision is None else (decision.device, decision.prefill)


def _least(indices: list[int | None]) -> int | None:
    return min((index for index in indices if index is not None), default=None)
