"""Keeps the keywords of one schema that restrict values, and rewrites them in keywords that llguidance supports."""

from __future__ import annotations

from typing import Any, Final

from .decimal_pattern import without_look_ahead
from .keywords import ENFORCED, FORMATS, IN_PLACE, REFUSED
from .references import Document, Place

_MAX_REFERENCES: Final = 16


def simplified(place: Place, document: Document) -> dict[str, Any]:
    """Returns the keywords of a schema that is an object, without annotations. Subschemas in them are not changed."""
    schema = place.schema
    kept = {
        keyword: value
        for keyword, value in schema.items()
        if keyword in ENFORCED or (keyword in REFUSED and _has_effect(keyword, schema))
    }
    if "format" in kept and not (isinstance(format := kept["format"], str) and format in FORMATS):
        del kept["format"]
    if "pattern" in kept:
        kept["pattern"] = without_look_ahead(kept["pattern"])
    if "propertyNames" in kept:
        _name_properties(kept, place, document)
    if "unevaluatedProperties" in kept and kept.keys().isdisjoint(IN_PLACE):
        kept.setdefault("additionalProperties", kept.pop("unevaluatedProperties"))
    return kept


def _has_effect(keyword: str, schema: dict[str, Any]) -> bool:
    """Returns whether a keyword that llguidance refuses restricts values at all, given its value and the schema's other
    keywords."""
    value = schema[keyword]
    match keyword:
        case "uniqueItems" | "not":
            return value is not False
        case "if":
            return "then" in schema or "else" in schema
        case "then" | "else":
            return "if" in schema
        case "minContains" | "maxContains":
            return "contains" in schema
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return bool(value != {})
        case "propertyNames":
            return value is not True and value not in ({}, {"type": "string"})
        case "unevaluatedItems" | "unevaluatedProperties":
            return value is not True and value != {}
    return True


def _name_properties(kept: dict[str, Any], place: Place, document: Document) -> None:
    """Rewrites `propertyNames` with `additionalProperties` as `properties` or `patternProperties` where that is
    possible: for dictionaries whose keys are an enum or a constrained string."""
    if "properties" in kept or "patternProperties" in kept:
        return
    names, value = (
        _without_references(place.child(kept["propertyNames"]), document),
        kept.get("additionalProperties", True),
    )
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return
    restricting = {
        keyword: one for keyword, one in names.items() if keyword in ENFORCED and keyword != "type"
    }
    listed = [restricting["const"]] if "const" in restricting else restricting.get("enum")
    if restricting.keys() <= {"const", "enum"} and isinstance(listed, list):
        kept["properties"] = {name: value for name in listed if isinstance(name, str)}
    elif restricting.keys() == {"pattern"} and isinstance(restricting["pattern"], str):
        kept["patternProperties"] = {restricting["pattern"]: value}
    elif restricting.keys() <= {"minLength", "maxLength"} and all(
        isinstance(n, int) for n in restricting.values()
    ):
        least, most = restricting.get("minLength", 0), restricting.get("maxLength", "")
        kept["patternProperties"] = {f"^[\\s\\S]{{{least},{most}}}$": value}
    else:
        return
    kept["additionalProperties"] = False
    del kept["propertyNames"]


def _without_references(place: Place, document: Document) -> Any:
    for _ in range(_MAX_REFERENCES):
        if not isinstance(place.schema, dict) or "$ref" not in place.schema:
            return place.schema
        found = document.follow(place.schema["$ref"], place.base)
        if found is None:
            return None
        place = found
    return None
