"""Words and numbers without quotes, in JSON's or another spelling."""

from __future__ import annotations

import re
from typing import Final

_WORDS: Final = {word: json for json in ("true", "false", "null") for word in (json, json.capitalize())} | {
    "None": "null"
}
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_OTHER_NUMBER: Final = re.compile(r"([+-]?)(0|[1-9][0-9]*|)(?:\.([0-9]*))?((?:[eE][+-]?[0-9]+)?)")


def json_of_word(word: str) -> str | None:
    """Returns a number, a boolean or a null in JSON's spelling; None for any other word."""
    if word in _WORDS:
        return _WORDS[word]
    return word if _NUMBER.fullmatch(word) else _number_json(word)


def _number_json(word: str) -> str | None:
    """Returns a number that JSON writes otherwise, such as `+5`, `.5` and `5.`; None if the word is none."""
    match = _OTHER_NUMBER.fullmatch(word)
    if match is None or not any(char.isdigit() for char in word):
        return None
    sign, whole, fraction, exponent = match.groups()
    decimals = "" if fraction is None else f".{fraction or '0'}"
    return f"{sign.removeprefix('+')}{whole or '0'}{decimals}{exponent}"
