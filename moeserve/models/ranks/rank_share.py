"""Divides a model among several GPUs: the part of each rank. No torch: placement and plan also use it.

Tensor parallelism (https://arxiv.org/abs/1909.08053), with experts whole: an expert's down matrix has too few
K-quant blocks to be cut. A rank's share is a model of its own, with fewer heads, narrower feed-forwards and some of
the experts, so loaders and blocks treat it like any model. Its blocks give partial sums, which are summed over the
ranks.

- Attention: whole groups of heads, with their rows of q, k and v and columns of the output product. If there are more
  ranks than KV heads, several ranks hold the same KV heads. Every rank computes all of attention, without a sum, if
  heads or the output's blocks do not divide, or with latent attention, an indexer, a norm of the full width or a
  recurrence.
- Routed experts: each is whole on one rank; every rank has the same number, balanced by use if that is known.
- Feed-forwards that all tokens pass: their width is divided by blocks. A rank may get no part of a shared expert. Every
  rank computes a layer without experts that is too narrow to divide, without a sum.
- Embedding, norms, routers and the head: on every rank.

Pipeline parallelism (`stage_of`): a rank has consecutive whole layers, as a model with these layers, numbered from 0.
Nothing is summed; the residual stream goes from rank to rank and back to the first, which has embedding and head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape, MoeShape
from moeserve.models.gpu_features import cpu_only_features
from moeserve.models.interface import LayerShape, ModelShape
from moeserve.models.sources.gguf import TensorInfo
from moeserve.models.sources.gguf import names as n
from moeserve.models.tensors import model_tensors

ACTIVATION_GROUP = 32  # columns that share a scale of int8 activations
K_BLOCK = 128  # columns that kernels process together: a cut elsewhere is padded


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Rows (first dimension) or columns (last dimension) from `start` up to `end` of a tensor."""

    is_columns: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RankShare:
    """The part of a model that one rank holds."""

    rank: int
    num_ranks: int
    shape: ModelShape  # shape of the share; a layer's `num_experts` is still the total of all ranks
    experts: tuple[tuple[int, ...], ...]  # per layer: ids of its routed experts, ascending
    slices: Mapping[str, TensorSlice]  # name → slice, for tensors that are divided
    absent: frozenset[str]  # tensors of the model that the rank does not hold
    zeroed: frozenset[str]  # biases of partial sums that another rank adds
    divides_attention: bool
    whole_ffns: frozenset[int]  # layers whose feed-forward every rank computes, or only this one
    first_layer: int = 0  # index in the model of the share's layer 0
    is_stage: bool = False  # pipeline parallelism: the share consists of whole layers

    def counts_of(self, counts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the counts of the share's experts from those of all experts: [layers][experts]."""
        return [[counts[self.first_layer + at][e] for e in ids] for at, ids in enumerate(self.experts)]

    def name_in_model(self, name: str) -> str:
        """Returns the file's name of one of the share's tensors."""
        layer = n.layer_of(name)
        return name if layer is None else n.in_layer(layer + self.first_layer, _in_any_layer(name))

    def name_in_share(self, name: str) -> str | None:
        """Returns the share's name for one of the file's tensors; None for a tensor of another rank's layers."""
        layer = n.layer_of(name)
        if layer is None:
            return name
        if not self.first_layer <= layer < self.first_layer + self.shape.num_layers:
            return None
        return n.in_layer(layer - self.first_layer, _in_any_layer(name))


def _in_any_layer(name: str) -> str:
    """Returns a tensor's name within its layer."""
    return name.split(".", 2)[2]


_STREAMS = "a residual of several streams, which one GPU computes alone"
_LAYER_INPUTS = "layers with inputs of their own, which one GPU computes alone"


def share_of(
    shape: ModelShape,
    tensors: Mapping[str, TensorInfo],
    rank: int,
    num_ranks: int,
    counts: Sequence[Sequence[int]] | None = None,
) -> RankShare:
    """Returns a rank's share for tensor parallelism. tensors: checked by `check_tensors`. counts: [layers][experts],
    tokens routed to each. Raises ValueError if `why_undivided` returns a reason."""
    if reason := why_undivided(shape, num_ranks):
        raise ValueError(reason)
    return _Division(shape, tensors, rank, num_ranks, counts).share()


def why_undivided(shape: ModelShape, num_ranks: int) -> str:
    """Returns the reason why `num_ranks` ranks cannot each hold a part of every layer; "" if they can."""
    if shape.is_sandwiched:
        return f"{shape.architecture} has norms behind its blocks, which are not divided"
    if any(layer.is_parallel for layer in shape.layers):
        return f"{shape.architecture} has attention and feed-forward beside each other, which are not divided"
    gated = (layer.mixer for layer in shape.layers if isinstance(layer.mixer, AttentionShape))
    if any(mixer.has_gate_matrix for mixer in gated) or (shape.latent and shape.latent.gate != "none"):
        return f"{shape.architecture} has gates of attention's output, whose matrix is not divided"
    if any(
        isinstance(layer.mixer, AttentionShape) and layer.mixer.v_dim != layer.mixer.head_dim
        for layer in shape.layers
    ):
        return f"{shape.architecture} has keys and values of different widths, which are not divided"
    if shape.recurrence is not None and shape.recurrence.undivided:
        return f"{shape.architecture} has {shape.recurrence.undivided}, which is not divided"
    if any(layer.mixer is None or layer.ffn is None for layer in shape.layers):
        return f"{shape.architecture} has layers without attention or a feed-forward, which are not divided"
    if shape.streams is not None:
        return f"{shape.architecture} has {_STREAMS}"
    if any(layer.kv_from is not None for layer in shape.layers):
        return f"{shape.architecture} has layers that attend to an earlier one's keys, which are not divided"
    if shape.layer_input_width:
        return f"{shape.architecture} has {_LAYER_INPUTS}"
    if shape.latent_expert_width:
        return f"{shape.architecture} has latent experts, which are not divided"
    if found := cpu_only_features(shape):
        return f"{shape.architecture} has {found[0]}, which no GPU computes"
    for index, layer in enumerate(shape.layers):
        if layer.moe and layer.num_experts < num_ranks:
            return f"{layer.num_experts} experts in layer {index} for {num_ranks} GPUs"
    return ""


def stage_of(shape: ModelShape, tensors: Mapping[str, TensorInfo], rank: int, num_ranks: int) -> RankShare:
    """Returns a rank's share for pipeline parallelism: consecutive layers, divided so that the largest share in bytes
    is minimal. tensors: the model's tensors by name, whose bytes are counted. Raises ValueError if there are too few
    layers: each share needs one that attends, and begins with one that does not need the layer before; and for a
    residual of several streams or per-layer embeddings."""
    if shape.streams is not None:
        raise ValueError(f"{shape.architecture} has {_STREAMS}")
    if shape.layer_input_width:
        raise ValueError(f"{shape.architecture} has {_LAYER_INPUTS}")
    sizes = [0] * shape.num_layers
    for name, tensor in tensors.items():
        layer = n.layer_of(name)
        if layer is not None and layer < len(sizes):
            sizes[layer] += tensor.nbytes
    attends = [layer.attention is not None for layer in shape.layers]
    starts = [not shape.needs_layer_before(index) for index in range(shape.num_layers)]
    cuts = cut_layers(sizes, attends, num_ranks, starts)
    first, end = cuts[rank], cuts[rank + 1]
    layers = tuple(_from(layer, first) for layer in shape.layers[first:end])
    own = replace(shape, layers=layers)
    return RankShare(
        rank,
        num_ranks,
        own,
        tuple(tuple(range(layer.num_experts)) for layer in layers),
        slices={},
        absent=_of_no_layer(shape) - _of_no_layer(own),
        zeroed=frozenset(),
        divides_attention=False,
        whole_ffns=frozenset(range(len(layers))),
        first_layer=first,
        is_stage=True,
    )


def _from(layer: LayerShape, first: int) -> LayerShape:
    """Returns the layer where layer `first` is number 0."""
    if not isinstance(layer.mixer, AttentionShape) or layer.mixer.kv_from is None:
        return layer
    return replace(layer, mixer=replace(layer.mixer, kv_from=layer.mixer.kv_from - first))


def _of_no_layer(shape: ModelShape) -> frozenset[str]:
    """Returns the tensors outside the layers. RoPE factors are among them only if some layer needs them."""
    return frozenset(name for name in model_tensors(shape) if n.layer_of(name) is None)


def cut_layers(
    sizes: Sequence[int], attends: Sequence[bool], parts: int, starts: Sequence[bool] | None = None
) -> list[int]:
    """Divides layers into `parts` consecutive parts, each with an attention layer, so that the largest part in bytes
    is minimal. starts: whether a layer may be the first of a part; None: all may. Returns the start of each part, and
    the end. Raises ValueError if that is impossible."""
    count = len(sizes)
    before = [0, *accumulate(sizes)]
    # Per number of parts: end of the last part → (bytes of the largest part, start of the last one).
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for _ in range(parts):
        ends: dict[int, tuple[int, int]] = {}
        for begin, (largest, _) in best[-1].items():
            for end in range(begin + 1, count + 1):
                may_end = end == count or starts is None or starts[end]
                if may_end and any(attends[begin:end]):
                    ends[end] = min(
                        ends.get(end, (before[-1] + 1, 0)), (max(largest, before[end] - before[begin]), begin)
                    )
        best.append(ends)
    if count not in best[-1]:
        raise ValueError(f"{count} layers, {sum(attends)} of which attend, for {parts} GPUs")
    cuts = [count]
    for ends in reversed(best[1:]):
        cuts.append(ends[cuts[-1]][1])
    return cuts[::-1]


class _Division:
    """The division of a model among `num_ranks` ranks, for one `rank`; used once."""

    def __init__(
        self,
        shape: ModelShape,
        tensors: Mapping[str, TensorInfo],
        rank: int,
        num_ranks: int,
        counts: Sequence[Sequence[int]] | None,
    ) -> None:
        self._shape = shape
        self._tensors = tensors
        self._rank = rank
        self._num_ranks = num_ranks
        self._counts = counts
        self._divides_attention = self._can_divide_attention()
        self._slices: dict[str, TensorSlice] = {}
        self._absent: set[str] = set()
        self._zeroed: set[str] = set()
        self._whole_ffns: set[int] = set()

    def share(self) -> RankShare:
        layers = tuple(self._layer(index, layer) for index, layer in enumerate(self._shape.layers))
        return RankShare(
            self._rank,
            self._num_ranks,
            replace(self._shape, layers=layers),
            tuple(self._experts(index) for index in range(len(layers))),
            self._slices,
            frozenset(self._absent),
            frozenset(self._zeroed),
            self._divides_attention,
            frozenset(self._whole_ffns),
        )

    # ---------------------------------------------------------------- attention

    def _can_divide_attention(self) -> bool:
        """Returns whether attention is divided: in all layers or in none, as buffers and KV cache have one form."""
        return all(
            isinstance(layer.mixer, AttentionShape) and self._divides(index, layer.mixer)
            for index, layer in enumerate(self._shape.layers)
        )

    def _divides(self, index: int, a: AttentionShape) -> bool:
        ranks, kv = self._num_ranks, a.num_kv_heads
        if a.indexer is not None or a.qk_norm == "full" or a.num_heads % ranks or (kv % ranks and ranks % kv):
            return False
        output = self._tensors[n.of_layer(index, n.ATTN_OUTPUT)]
        columns = a.q_width // ranks
        return columns % output.type.block_columns == 0 and columns % ACTIVATION_GROUP == 0

    def _attention(self, index: int, a: AttentionShape) -> AttentionShape:
        ranks, rank = self._num_ranks, self._rank
        heads, kv_heads = a.num_heads // ranks, max(1, a.num_kv_heads // ranks)
        first_kv = rank * a.num_kv_heads // ranks
        mine = replace(a, num_heads=heads, num_kv_heads=kv_heads)
        of_q = (rank * mine.q_rows, (rank + 1) * mine.q_rows)
        of_kv = (first_kv * a.head_dim, (first_kv + kv_heads) * a.head_dim)
        for part, (start, end) in ((n.ATTN_Q, of_q), (n.ATTN_K, of_kv), (n.ATTN_V, of_kv)):
            self._cut(n.of_layer(index, part), start, end)
            if a.qkv_bias:
                self._cut(n.bias_of_layer(index, part), start, end)
        self._cut_columns(n.of_layer(index, n.ATTN_OUTPUT), rank * mine.q_width, (rank + 1) * mine.q_width)
        if a.output_bias and rank:
            self._zeroed.add(n.bias_of_layer(index, n.ATTN_OUTPUT))
        if a.has_sinks:
            self._cut(n.of_layer(index, n.ATTN_SINKS), rank * heads, (rank + 1) * heads)
        return mine

    # ---------------------------------------------------------------- feed-forwards

    def _layer(self, index: int, layer: LayerShape) -> LayerShape:
        mixer = layer.mixer
        if self._divides_attention and isinstance(mixer, AttentionShape):
            mixer = self._attention(index, mixer)
        assert layer.ffn is not None  # as `why_undivided` tells
        if isinstance(layer.ffn, DenseFfnShape):
            return replace(layer, mixer=mixer, ffn=self._dense(index, layer.ffn))
        return replace(layer, mixer=mixer, ffn=self._moe(index, layer.ffn))

    def _dense(self, index: int, ffn: DenseFfnShape) -> DenseFfnShape:
        block = self._block_of_width(index, ffn.width, n.FFN_PARTS)
        if ffn.width // block < self._num_ranks:
            self._whole_ffns.add(index)
            return ffn
        return DenseFfnShape(self._cut_width(index, ffn.width, n.FFN_PARTS))

    def _moe(self, index: int, moe: MoeShape) -> MoeShape:
        if moe.shared is None:
            return moe
        width = self._cut_width(index, moe.shared.width, n.SHARED_PARTS)
        if width:
            return replace(moe, shared=replace(moe.shared, width=width))
        if moe.shared.is_gated:
            self._absent.add(n.of_layer(index, n.FFN_GATE_INP_SHEXP))
        return replace(moe, shared=None)

    def _cut_width(self, index: int, width: int, parts: tuple[str, str, str]) -> int:
        """Divides a gated feed-forward at block boundaries of the down matrix's columns. Returns the width of this
        rank's part."""
        gate, up, down = (n.of_layer(index, part) for part in parts)
        block = self._block_of_width(index, width, parts)
        blocks, rank, ranks = width // block, self._rank, self._num_ranks
        start = rank * blocks // ranks * block
        end = width if rank == ranks - 1 else (rank + 1) * blocks // ranks * block
        if start == end:
            self._absent |= {gate, up, down}
            return 0
        self._cut(gate, start, end)
        self._cut(up, start, end)
        self._cut_columns(down, start, end)
        return end - start

    def _block_of_width(self, index: int, width: int, parts: tuple[str, str, str]) -> int:
        """Returns the number of columns in the smallest unit by which a down matrix can be divided."""
        least = max(ACTIVATION_GROUP, self._tensors[n.of_layer(index, parts[2])].type.block_columns)
        block = max(least, K_BLOCK)
        return least if width % block or width // block < self._num_ranks else block

    def _experts(self, index: int) -> tuple[int, ...]:
        count, ranks = self._shape.layers[index].num_experts, self._num_ranks
        if self._counts is None:
            return tuple(range(self._rank * count // ranks, (self._rank + 1) * count // ranks))
        most, used = -(-count // ranks), self._counts[index]
        own: list[list[int]] = [[] for _ in range(ranks)]
        load = [0] * ranks
        for expert in sorted(range(count), key=lambda e: (-used[e], e)):
            least = min((r for r in range(ranks) if len(own[r]) < most), key=lambda r: (load[r], len(own[r])))
            own[least].append(expert)
            load[least] += used[expert]
        return tuple(sorted(own[self._rank]))

    # ---------------------------------------------------------------- tensors

    def _cut(self, name: str, start: int, end: int) -> None:
        self._slices[name] = TensorSlice(False, start, end)

    def _cut_columns(self, name: str, start: int, end: int) -> None:
        self._slices[name] = TensorSlice(True, start, end)
