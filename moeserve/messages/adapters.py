"""Messages about LoRA adapters that are loaded and unloaded while the server runs, between httpserver, router and
worker.

The router decides which adapters are loaded. It sends the worker the full list of wanted adapters, repeatedly until the
worker has all of them. So a new worker gets the same message as one that has served for days. An adapter's `key` is a
digest of its files. A name may get another adapter later; a key always means the same numbers.
"""

from __future__ import annotations

import msgspec

# ---------------------------------------------------------------- httpserver -> router


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """httpserver -> router. Asks for an adapter to be loaded; answered with an AdapterAnswer."""

    ticket: int  # unique while the server runs
    name: str
    path: str  # absolute; httpserver has checked that it may be read
    replaces: bool = False  # the adapter of this name, if any; its running requests continue with the old one


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Frees the name; the adapter's running requests continue with it. Answered with an AdapterAnswer."""

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
    """All served adapters, sent when one was loaded or unloaded."""

    adapters: list[ServedAdapter]


class AdapterAnswer(msgspec.Struct, frozen=True, tag=True):
    """The result of a LoadAdapter or UnloadAdapter. If the list of adapters changed, an AdaptersServed was sent
    before."""

    ticket: int
    status: int  # HTTP status
    message: str


# ---------------------------------------------------------------- router -> worker, worker -> router


class AdapterSource(msgspec.Struct, frozen=True, array_like=True):
    order: int  # unique while the router runs
    name: str  # for messages
    path: str
    # Key of an adapter that was loaded before: the worker may still have it, although `path` may hold another by now.
    key: str = ""


class AdaptersWanted(msgspec.Struct, frozen=True, tag=True):
    """All wanted adapters. The worker unloads others at once, and reads missing ones while steps run."""

    sources: list[AdapterSource]


class AdapterState(msgspec.Struct, frozen=True, array_like=True):
    """The state of one source: loaded if it has a key, failed if it has an error, otherwise being loaded."""

    order: int
    key: str = ""
    num_bytes: int = 0
    error: str | None = None


class AdaptersReport(msgspec.Struct, frozen=True, tag=True):
    states: list[AdapterState]  # one for each source, in order
