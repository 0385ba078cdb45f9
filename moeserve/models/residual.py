"""The shapes of residuals of several streams, and of the n-gram embeddings that one of its layers adds to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moeserve.kernels.ngrams.hashing import NgramHashes
from moeserve.models.sources.gguf import names as n

TABLE_CACHE_BYTES = 256 << 20  # RAM for the rows of a table on disk that were used last, at most


def cached_table_bytes(table_bytes: int) -> int:
    """Returns the maximum bytes of RAM for cached rows of a table of `table_bytes` bytes."""
    return min(table_bytes, TABLE_CACHE_BYTES)


@dataclass(frozen=True, slots=True)
class HyperConnections:
    """A residual of `count` streams, which blocks read through a gate of `low_rank`: kernels/streams/reference.py.
    It replaces the norms before blocks and before the head."""

    count: int
    low_rank: int

    def tensors(self, hidden: int, block: str, *, injects: bool = True) -> dict[str, tuple[int, ...]]:
        """Returns the tensors of one block, by name within a layer. block: n.HC_ATTN, say. injects: False before the
        head, which adds nothing."""
        width = self.count * hidden
        parts: dict[str, tuple[int, ...]] = {
            n.of_part(f"{block}_norm"): (width,),
            n.of_part(f"{block}_down"): (self.low_rank, width),
            n.of_part(f"{block}_up"): (width, self.low_rank),
        }
        return parts | ({n.of_part(f"{block}_inject"): (self.count, width)} if injects else {})


@dataclass(frozen=True, slots=True)
class SinkhornConnections:
    """A residual of `count` streams. A block reads a weighted sum of the streams; behind the block a doubly
    stochastic matrix mixes them: kernels/streams/sinkhorn.py. Blocks and the head keep their norms."""

    count: int
    iterations: int  # of Sinkhorn's algorithm
    eps: float
    weighs_head: bool = True  # False: the head reads the streams' mean, in place of a weighted sum

    @property
    def added_values(self) -> int:
        """Weights per token: `count` with which a block's output is added, and count x count that mix the streams."""
        return self.count * (1 + self.count)

    @property
    def mix_values(self) -> int:
        """Rows of the matrix that computes all weights of a block: `count` with which it reads the streams, and
        `added_values`."""
        return self.count + self.added_values

    def tensors(self, hidden: int, block: str, *, injects: bool = True) -> dict[str, tuple[int, ...]]:
        """Returns the tensors of one block, without its norm: see `HyperConnections.tensors`."""
        if not injects and not self.weighs_head:
            return {}
        values, scales = (self.mix_values, 3) if injects else (self.count, 1)
        return {
            n.of_part(f"{block}_fn"): (values, self.count * hidden),
            n.of_part(f"{block}_base"): (values,),
            n.of_part(f"{block}_scale"): (scales,),
        }


class StreamReading(NamedTuple):
    """Describes how one block reads attention residuals, and where its output goes."""

    num: int  # the first streams are read
    into: int  # the stream that the output is added to: the last that the next block reads
    begins: bool  # the output replaces that stream


@dataclass(frozen=True, slots=True)
class AttentionResiduals:
    """A residual that begins anew with the mixer's output of every `block_size`-th layer. Stream 0 is the embedding,
    and stream i the sum of the outputs of the i-th group of layers. A block reads a weighted sum of all streams so far:
    kernels/streams/attended.py. Blocks and the head keep their norms."""

    num_layers: int
    block_size: int  # layers

    @property
    def count(self) -> int:
        return 1 + -(-self.num_layers // self.block_size)

    def reading(self, block: str, layer: int | None) -> StreamReading:
        """Returns how a block reads the streams. block: n.HC_ATTN, say. layer: its layer; None: the head, whose `into`
        has no meaning."""
        if layer is None:
            return StreamReading(self.count, 0, False)
        into = 1 + layer // self.block_size
        begins = block == n.HC_ATTN and layer % self.block_size == 0
        return StreamReading(into if begins else into + 1, into, begins)

    def tensors(self, hidden: int, block: str, *, injects: bool = True) -> dict[str, tuple[int, ...]]:
        """Returns the tensors of one block, without its norm: see `HyperConnections.tensors`."""
        del injects
        return {n.of_part(n.RES_SCORES[block]): (hidden,)}


ResidualStreams = HyperConnections | SinkhornConnections | AttentionResiduals


@dataclass(frozen=True, slots=True)
class NgramShape:
    """Embeddings of a token's last n-grams, which one layer adds to the residual before its blocks:
    kernels/ngrams/reference.py. The table stays in the file; rows are read as tokens need them."""

    layer: int  # that adds them
    hashes: NgramHashes
    head_width: int  # numbers of a row
    table_rows: int  # of all heads, with padding
    conv_kernel: int  # taps of the convolution, `hashes.size` tokens apart

    @property
    def width(self) -> int:
        """Width of all of a token's n-gram embeddings together."""
        return len(self.hashes.head_rows) * self.head_width

    @property
    def kept_inputs(self) -> int:
        """Tokens whose inputs to the convolution a sequence's state holds."""
        return (self.conv_kernel - 1) * self.hashes.size

    def state_values(self, residual: int) -> int:
        """Float32 numbers of a sequence's state. residual: numbers of a token's residual."""
        return self.kept_inputs * residual

    def tensors(self, hidden: int, residual: int) -> dict[str, tuple[int, ...]]:
        """Returns the layer's own tensors, by name within it; without the table."""
        norms = (n.PLE_NORM_QUERY, n.PLE_NORM_KEY, n.PLE_NORM_CONV)
        parts: dict[str, tuple[int, ...]] = {n.of_part(norm): (residual,) for norm in norms}
        return parts | {
            n.of_part(n.PLE_KEY): (residual, self.width),
            n.of_part(n.PLE_VALUE): (hidden, self.width),
            n.of_part(n.PLE_CONV1D): (residual, self.conv_kernel),
        }
