"""Gives a file of random weights routing with the locality of a trace, in any engine that reads the file.

A token's embedding marks, in a part of the hidden state for each layer, the experts that the trace has for it. The
marks are so large that the layers' outputs hardly change them, and each router reads its layer's part. The head's row
of token t + 1 is token t's embedding, so that a greedy answer goes through the trace, from its prompt's last token on.

As the marks are there from the start, every guess of a later layer's experts is right.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType as Type

from moeserve.models.interface import ModelShape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.file import open_gguf
from moeserve.placement.expert_cache.routing_trace import RoutingTrace
from tests.support.models.model_header import q4_k_m

MARK = 256.0  # beside layers' outputs of about 1
ROUTER_LOGIT, HEAD_LOGIT = 8.0, 200.0  # of what is marked, about


def traced_type(name: str, layers: int) -> Type:
    """Q4_K_M's types, but for embedding and head, whose values count here."""
    return Type.F16 if name in (n.TOKEN_EMBD, n.OUTPUT) else q4_k_m(name, layers)


def write_routing(path: Path, shape: ModelShape, trace: RoutingTrace) -> None:
    """Overwrites embedding, routers and head of a file with weights, whose types are `traced_type`'s. Raises ValueError
    for a trace that does not fit: it must have as many tokens as the vocabulary, and layers x experts must not exceed
    the hidden size."""
    tokens, layers, experts = len(trace.ids), shape.num_layers, shape.num_experts
    marked = layers * experts
    if (
        trace.shape != (layers, experts, shape.top_k)
        or tokens != shape.vocab_size
        or marked > shape.hidden_size
    ):
        raise ValueError(f"a trace of {tokens} tokens and {trace.shape} does not fit the model")
    embedding = np.zeros((tokens, shape.hidden_size), np.float32)
    columns = np.arange(layers)[:, None] * experts + trace.ids.astype(np.int64)
    np.put_along_axis(embedding, columns.reshape(tokens, -1), MARK, axis=1)
    # The other columns tell tokens with equal experts apart.
    others = embedding[:, marked:].shape
    embedding[:, marked:] = np.random.default_rng(0).choice([-MARK, MARK], others)
    rms = np.sqrt((embedding**2).mean(axis=1, keepdims=True))
    head = embedding / rms * (HEAD_LOGIT / shape.hidden_size)
    tensors = open_gguf(path).tensors
    with path.open("r+b") as file:
        for name, values in ((n.TOKEN_EMBD, embedding), (n.OUTPUT, np.roll(head, 1, axis=0))):
            file.seek(tensors[name].offset)
            file.write(values.astype(np.float16).tobytes())
        for layer in range(layers):
            router = np.zeros((experts, shape.hidden_size), np.float32)
            router[np.arange(experts), layer * experts + np.arange(experts)] = (
                ROUTER_LOGIT * rms.mean() / MARK
            )
            file.seek(tensors[f"blk.{layer}.{n.FFN_GATE_INP}.weight"].offset)
            file.write(router.tobytes())
