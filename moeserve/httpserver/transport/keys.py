"""The API keys and their names. The router gets the name of a request's key, never the key, and shares a busy server
fairly between names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError


class ApiKeys:
    """The known keys. They are kept as digests, so that the time of a look-up does not reveal how much of a key is
    right."""

    def __init__(self, named: dict[str, str], numbered: Iterable[str] = ()) -> None:
        """named: maps keys to names. numbered: keys that are named by their position."""
        self._names = {_digest(key.encode()): name for key, name in named.items()}
        self._numbered = frozenset(_digest(key.encode()) for key in numbered)

    @classmethod
    def from_config(cls, config: ServerConfig) -> ApiKeys:
        """Returns the keys of --api-key, named by their position (key-1, key-2, ...), and of --api-key-file. Raises
        ConfigError if the file cannot be read or parsed."""
        named = {key: f"key-{place}" for place, key in enumerate(config.api_key, 1)}
        if config.api_key_file is not None:
            for name, key in _read(Path(config.api_key_file)):
                if named.setdefault(key, name) != name:
                    raise ConfigError(
                        f"--api-key-file: {name!r} and {named[key]!r} have the same key; give each its own"
                    )
        return cls(named, config.api_key)

    def reload(self, config: ServerConfig) -> None:
        """Reads the file of keys again. Raises ConfigError for a bad file; the old keys then stay."""
        other = self.from_config(config)
        self._names, self._numbered = other._names, other._numbered

    def __bool__(self) -> bool:
        return bool(self._names)

    def key_in(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
        """Returns the first known key in a request's headers; None if there is none. Header names are in lower case."""
        return next((key for key in _given(headers) if self.name_of(key) is not None), None)

    def name_of(self, key: bytes) -> str | None:
        """Returns the key's name; None for an unknown key."""
        return self._names.get(_digest(key))

    def name_of_owner(self, owner: str) -> str | None:
        """Returns the name of the key with this owner (see `owner_of`); None if the key no longer exists."""
        kind, _, rest = owner.partition(":")
        if kind == "key":
            digest = bytes.fromhex(rest)
            return self._names.get(digest) if digest in self._numbered else None
        return rest if rest in self._names.values() else None

    def owner_of(self, key: bytes) -> str:
        """Returns an identifier of the key's owner for data that outlives the server: the name in the file; for a
        numbered key its digest, because its number changes when an earlier key is removed. Raises KeyError for an
        unknown key."""
        digest = _digest(key)
        return f"key:{digest.hex()}" if digest in self._numbered else f"name:{self._names[digest]}"


def fault_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Returns a sentence that says why the headers have no known key."""
    headers = list(headers)
    if any(_given(headers)):
        return "the one that was sent is not known here"
    if any(name == b"x-api-key" for name, _ in headers):
        return "the x-api-key header is empty"
    found = next((value for name, value in headers if name == b"authorization"), None)
    if found is None:
        return "none was sent"
    is_bearer = found.lower().startswith(b"bearer")
    return f"the Authorization header {'has none' if is_bearer else 'is not of the form Bearer <key>'}"


def _given(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()
        elif name == b"x-api-key":  # sent by Anthropic's clients
            yield value


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(path: Path) -> Iterator[tuple[str, str]]:
    """Yields name and key of each line that is neither empty nor a comment (#)."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--api-key-file: {path} cannot be read: {error}; name a text file that the server may read"
        ) from error
    found = False
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ConfigError(
                f"--api-key-file: line {number} of {path} must be a name and a key; write both, with a space "
                "between"
            )
        found = True
        yield words[0], words[1]
    if not found:
        raise ConfigError(f"--api-key-file: {path} has no key; write a name and a key on each line")
