"""Random JSON Schemas whose answers end by themselves: every string, number and array has a bound."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
PATTERNS = ("^[a-c]{2,5}$", r"^\d{3}-\d{2}$", "^(yes|no|maybe)$", "^[A-Z][a-z]{0,4}$")
NAMES = ("name", "größe", "x y", 'quo"te', "a", "count", "items", "$id_", "UPPER", "0")


class SchemaMaker:
    """One schema after another, the same for a seed."""

    def __init__(self, seed: int, *, compact: bool = True) -> None:
        """`compact`: answers without white space, so that a model that writes at random comes to an end sooner."""
        self._random = random.Random(seed)
        self._compact = compact
        self._defs: dict[str, Schema] = {}

    def schema(self) -> Schema:
        self._defs = {}
        made = self._object(3) if self._random.random() < 0.7 else self._any(3)
        if self._defs:
            made["$defs"] = self._defs
        if self._compact:
            made["x-guidance"] = {"whitespace_flexible": False}
        return made

    def _any(self, depth: int) -> Schema:
        leaves = [self._string, self._integer, self._number, self._words, self._constant, self._plain]
        if depth == 0:
            return self._random.choice(leaves)()
        nested = [self._object, self._array, self._tuple, self._either, self._reference, self._both]
        # A leaf as often as it is listed; what is nested counts twice.
        index = self._random.randrange(len(leaves) + 2 * len(nested))
        return leaves[index]() if index < len(leaves) else nested[(index - len(leaves)) % len(nested)](depth)

    # ---- leaves

    def _string(self) -> Schema:
        kind = self._random.random()
        if kind < 0.2:
            return {"type": "string", "format": self._random.choice(FORMATS), "maxLength": 40}
        if kind < 0.5:
            return {"type": "string", "pattern": self._random.choice(PATTERNS)}
        low = self._random.randint(0, 4)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randint(0, 8)}

    def _integer(self) -> Schema:
        low = self._random.randint(-200, 200)
        high = low + self._random.choice([0, 1, 7, 1000])
        made: Schema = {"type": "integer", "minimum": low, "maximum": high}
        if self._random.random() < 0.3:
            made = {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
        return made

    def _number(self) -> Schema:
        low = round(self._random.uniform(-10, 10), 2)
        return {"type": "number", "minimum": low, "maximum": low + self._random.choice([0.5, 3.25, 100])}

    def _words(self) -> Schema:
        values = ["red", "green", 'b"lue', 7, -1.5, None, True, {"a": [1]}, ["x"]]
        return {"enum": self._random.sample(values, self._random.randint(1, 5))}

    def _constant(self) -> Schema:
        return {"const": self._random.choice(["fixed", 0, False, None, [1, {"k": "v"}]])}

    def _plain(self) -> Schema:
        return {"type": self._random.choice(["boolean", "null", ["boolean", "null"]])}

    # ---- nested

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(NAMES, self._random.randint(0, 4))
        required = [name for name in names if self._random.random() < 0.7]
        return {
            "type": "object",
            "properties": {name: self._any(depth - 1) for name in names},
            "required": required,
            "additionalProperties": False,
        }

    def _array(self, depth: int) -> Schema:
        low = self._random.randint(0, 2)
        return {
            "type": "array",
            "items": self._any(depth - 1),
            "minItems": low,
            "maxItems": low + self._random.randint(0, 2),
        }

    def _tuple(self, depth: int) -> Schema:
        parts = [self._any(depth - 1) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _either(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth - 1) for _ in range(self._random.randint(1, 3))]}

    def _both(self, depth: int) -> Schema:
        low = self._random.randint(0, 50)
        return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 30}]}

    def _reference(self, depth: int) -> Schema:
        name = f"def{len(self._defs)}"
        self._defs[name] = {}  # taken, before what is in it takes the next
        self._defs[name] = self._any(depth - 1)
        return {"$ref": f"#/$defs/{name}"}
