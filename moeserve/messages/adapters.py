"""LoRA adapters that come and go while the server runs: what httpserver, router and worker say of them.

The router decides which adapters there are. It tells the worker all that are wanted, again and again until it has them;
so a worker that has just been started is told nothing else than one that has served for days. An adapter's `key` is a
digest of its files: what is said of a name may change, a key means the same numbers for ever.
"""

from __future__ import annotations

import msgspec

# ---------------------------------------------------------------- httpserver -> router


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Answered with an AdapterAnswer."""

    ticket: int  # unique while the server runs
    name: str
    path: str  # absolute; httpserver has checked that it may be read
    replaces: bool = False  # an adapter of this name, if there is one: its running requests go on with it


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """The name is free from now on; the adapter's running requests go on. Answered with an AdapterAnswer."""

    ticket: int
    name: str


# ---------------------------------------------------------------- router -> httpserver


class ServedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that requests may name."""

    name: str
    path: str
    key: str
    num_bytes: int = 0  # in the worker's memory


class SavedAdapter(msgspec.Struct, frozen=True):
    """One entry of the list in `RuntimePaths.adapters_file`, as JSON."""

    name: str
    path: str
    key: str
    is_served: bool  # False: only requests that already use it may continue


class AdaptersServed(msgspec.Struct, frozen=True, tag=True):
    """All of them, after one has come or gone."""

    adapters: list[ServedAdapter]


class AdapterAnswer(msgspec.Struct, frozen=True, tag=True):
    """The result of a LoadAdapter or UnloadAdapter; an AdaptersServed that follows from it has come before."""

    ticket: int
    status: int  # HTTP status
    message: str


# ---------------------------------------------------------------- router -> worker, worker -> router


class AdapterSource(msgspec.Struct, frozen=True, array_like=True):
    order: int  # unique while the router runs
    name: str  # for messages
    path: str
    # Of one that was loaded before, which the worker may have; what lies at `path` may be another.
    key: str = ""


class AdaptersWanted(msgspec.Struct, frozen=True, tag=True):
    """All that there are to be: others are given up at once, missing ones are read behind the steps."""

    sources: list[AdapterSource]


class AdapterState(msgspec.Struct, frozen=True, array_like=True):
    """The state of one source: loaded where it has a key, failed where it has an error, else on its way."""

    order: int
    key: str = ""
    num_bytes: int = 0
    error: str | None = None


class AdaptersReport(msgspec.Struct, frozen=True, tag=True):
    states: list[AdapterState]  # one for each source, in order
