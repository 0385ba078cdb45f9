"""The scope of an adapter: the kinds of products that it changes. A CUDA graph for a scope launches no adapter products
of other kinds."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from moeserve.models.adapters.products import QKV_PARTS
from moeserve.models.sources.gguf import names as n


class AdapterScope(enum.IntFlag):
    NONE = 0
    ATTENTION = 1
    ROUTER = 2
    ROUTED_EXPERTS = 4
    FEED_FORWARD = 8  # feed-forwards without routing: shared experts, dense layers
    ALL = 15


_SCOPES = {
    **dict.fromkeys((*QKV_PARTS, n.ATTN_OUTPUT), AdapterScope.ATTENTION),
    n.FFN_GATE_INP: AdapterScope.ROUTER,
    **dict.fromkeys(n.EXPERT_PARTS, AdapterScope.ROUTED_EXPERTS),
    **dict.fromkeys((*n.FFN_PARTS, *n.SHARED_PARTS), AdapterScope.FEED_FORWARD),
}


def scope_of(parts: Iterable[str]) -> AdapterScope:
    """Returns the scope of an adapter that changes these products (products.py)."""
    found = AdapterScope.NONE
    for part in parts:
        found |= _SCOPES[part]
    return found
