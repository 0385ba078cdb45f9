"""The shape of compressed attention (DeepSeek-V4) and its tensors; an alternative to `AttentionShape`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.models.latent import AttentionForm, head_parts
from moeserve.models.sources.gguf import names as n

PLACE_COLUMNS = 32  # additional columns of a draft's record: csrc/ops/compressed.h
# Rows of a ring beyond the window's: one for each draft of a row, because drafts' keys are written before it is known
# which drafts are accepted.
RING_DRAFTS = 16


@dataclass(frozen=True, slots=True)
class Compressor:
    """Compresses each block of `ratio` tokens into one entry, to which queries attend instead of the tokens:
    kernels/compressed/reference.py."""

    ratio: int
    dim: int  # of an entry
    overlaps: bool  # the tokens of the block before take part, with columns of their own

    @property
    def width(self) -> int:
        """Width of each of the two products that a token has: values and gates."""
        return 2 * self.dim if self.overlaps else self.dim

    @property
    def state_values(self) -> int:
        """Number of float32 values in a sequence's state: for each entry in progress the greatest gate, the sum of
        weights, and the weighted sum."""
        return 3 * self.width

    @property
    def pending_values(self) -> int:
        """Number of float32 values in a draft's record."""
        return 2 * self.width + PLACE_COLUMNS


@dataclass(frozen=True, slots=True)
class EntryIndexer:
    """Chooses the `top` entries that a query attends to, by index keys that have a compressor of their own."""

    num_heads: int
    dim: int  # of an index key and of a head's query, whose last `rotary_dim` numbers rotate
    top: int

    @property
    def q_width(self) -> int:
        return self.num_heads * self.dim


@dataclass(frozen=True, slots=True)
class CompressedAttentionShape:
    """Attention whose heads share one key per token, which is also its value. A query attends to the tokens of a
    window and to entries, each compressed from a block of tokens. The end of a head rotates, in pairs of neighbours;
    the output is rotated back and goes through two matrices, the first by groups of heads."""

    num_heads: int
    head_dim: int
    rotary_dim: int  # at the end of a head
    q_rank: int  # width of the compressed q
    window: int  # a position attends to itself and the window - 1 tokens before it
    output_groups: int  # divides num_heads
    output_rank: int  # outputs of a group's matrix
    compressor: Compressor | None = None  # None: queries attend to the window only
    # Chooses the entries that queries attend to; None: they attend to all.
    indexer: EntryIndexer | None = None
    rope_theta: float | None = None  # None: the model's `rope_theta`
    rope_scaled: bool = False  # the model's `rope_scaling` applies

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def form(self) -> AttentionForm:
        return AttentionForm(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.rotary_dim,
            self.rope_theta,
            value_dim=self.head_dim,
            rope_scaled=self.rope_scaled,
        )

    @property
    def scale(self) -> float:
        """The factor of attention scores."""
        return float(self.head_dim**-0.5)

    @property
    def index_compressor(self) -> Compressor | None:
        """The compressor of index keys."""
        if self.indexer is None or self.compressor is None:
            return None
        return Compressor(self.compressor.ratio, self.indexer.dim, self.compressor.overlaps)

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """The compressors of keys and of index keys."""
        return tuple(each for each in (self.compressor, self.index_compressor) if each is not None)

    @property
    def state_values(self) -> int:
        """Number of float32 values in a sequence's state, which holds its entries in progress."""
        return sum(each.state_values for each in self.compressors)

    @property
    def pending_values(self) -> int:
        """Number of float32 values in a draft's record, for all compressors together."""
        return sum(each.pending_values for each in self.compressors)

    @property
    def ratio(self) -> int:
        """Number of tokens in a block; 0 if the layer has no entries."""
        return 0 if self.compressor is None else self.compressor.ratio

    @property
    def chosen(self) -> int:
        """Number of entries that the indexer chooses for a query; 0: queries attend to all."""
        return 0 if self.indexer is None else self.indexer.top

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        return self.q_width

    @property
    def output_width(self) -> int:
        """Input width of the last product."""
        return self.output_groups * self.output_rank

    @property
    def output_part(self) -> str:
        """Name of the last product's matrix."""
        return n.ATTN_OUTPUT_B

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """Widths of the vectors that a token stores in the KV cache: the entry of a block that ends with it."""
        return () if self.compressor is None else (self.head_dim,)

    @property
    def ring_rows(self) -> int:
        """Number of the last tokens whose keys a sequence's state holds."""
        return self.window + RING_DRAFTS

    @property
    def index_width(self) -> int:
        """Width of the index key in a KV slot, which belongs to the block that ends with the slot's token; 0: no index
        keys."""
        return 0 if self.indexer is None else self.indexer.dim

    @property
    def attended_values(self) -> int:
        """Number of multiply-adds for each pair of a query token and a key."""
        return 2 * self.q_width

    @property
    def head_parts(self) -> int:
        """Number of equal parts into which the heads are divided for CPU threads."""
        return head_parts(self.num_heads)

    @property
    def input_parts(self) -> tuple[tuple[str, int], ...]:
        """Names and rows of the matrices over the layer's input: compressed q and the key; the compressors' products;
        the index heads' weights."""
        parts: list[tuple[str, int]] = [(n.ATTN_Q_A, self.q_rank), (n.ATTN_KV, self.head_dim)]
        for compressor, names in zip(self.compressors, n.COMPRESSORS, strict=False):
            parts += [(names.kv, compressor.width), (names.gate, compressor.width)]
        if self.indexer is not None:
            parts.append((n.INDEXER_PROJ, self.indexer.num_heads))
        return tuple(parts)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that determine the matrices' dimensions, by metadata name."""
        sizes = {"attention.q_lora_rank": self.q_rank, "attention.output_lora_rank": self.output_rank}
        return sizes | ({} if self.indexer is None else {"attention.indexer.key_length": self.indexer.dim})

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Returns the tensors by name within a layer, with row-major shapes; without the input norm."""
        parts: dict[str, tuple[int, ...]] = {
            n.of_part(part): (rows, hidden) for part, rows in self.input_parts
        }
        for compressor, names in zip(self.compressors, n.COMPRESSORS, strict=False):
            parts[n.of_part(names.bias)] = (compressor.ratio, compressor.width)
            parts[n.of_part(names.norm)] = (compressor.dim,)
        if self.indexer is not None:
            parts[n.of_part(n.INDEXER_Q_B)] = (self.indexer.q_width, self.q_rank)
        return parts | {
            n.of_part(n.ATTN_Q_A_NORM): (self.q_rank,),
            n.of_part(n.ATTN_Q_B): (self.q_rows, self.q_rank),
            n.of_part(n.ATTN_KV_A_NORM): (self.head_dim,),
            n.of_part(n.ATTN_SINKS): (self.num_heads,),
            n.of_part(n.ATTN_OUTPUT_A): (self.output_width, self.q_width // self.output_groups),
            n.of_part(n.ATTN_OUTPUT_B): (hidden, self.output_width),
        }


def widest_products(layers: Sequence[CompressedAttentionShape]) -> tuple[int, int]:
    """Returns the widths of the widest compressors' products: of keys, and of index keys; 0 for none."""
    of_keys = max((each.compressor.width for each in layers if each.compressor is not None), default=0)
    of_index = (each.index_compressor for each in layers)
    return of_keys, max((each.width for each in of_index if each is not None), default=0)
