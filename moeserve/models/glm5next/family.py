"""GLM-5.3-Flash (https://huggingface.co/zai-org/GLM-5.3-Flash).

Three of four layers are Kimi Delta Attention, whose decays have a lower bound. The fourth is DeepSeek's latent
attention without positions, to the blocks of keys that an indexer chooses by pooled index keys. The residual has
several streams that are mixed; the head reads their mean. The first layers have no experts; the others have
DeepSeek-V3's router and an ungated shared expert. Gates and up-projections of all feed-forwards are clamped. The last
layer in the file predicts a further token (MTP); it attends, and its residual is one vector.

llama.cpp calls the architecture glm5-next. Files that were made before llama.cpp named it say glm5next; they have the
same keys and tensors.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.feed_forward import DenseFfnShape, MoeShape
from moeserve.models.glm5next.hugging_face import MAPPING
from moeserve.models.indexer import IndexerShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.recurrence import GatedDeltaNetShape
from moeserve.models.recurrent_heads import kimi_delta_heads
from moeserve.models.residual import SinkhornConnections
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

MOST_POOLED = 1 << 12  # keys of a block: the published model has 4


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    Layers without KV heads are recurrent."""
    reader = ShapeReader(source)
    recurrent = [heads == 0 for heads in reader.layer_integers("attention.head_count_kv", 0, 1024)]
    if all(recurrent):
        raise reader.error("attention.head_count_kv", "has no attention layer, which is not supported")
    num_heads = reader.integer("attention.head_count", 1, 1024)
    delta_net, attention = _delta_net(reader, num_heads), _attention(reader, num_heads)
    _check_own_indexers(reader, recurrent)
    layers = (
        LayerShape(delta_net if is_recurrent else attention, ffn)
        for is_recurrent, ffn in zip(recurrent, _feed_forwards(reader), strict=True)
    )
    streams = SinkhornConnections(
        count=reader.integer("hyper_connection.count", 2, 16),
        iterations=reader.integer("hyper_connection.sinkhorn_iterations", 1, 1024),
        eps=reader.number("hyper_connection.epsilon", 1e-12, 1e-2),
        weighs_head=False,
    )
    return replace(reader.model(tuple(layers), rope_theta=10000.0), streams=streams)


def _delta_net(reader: ShapeReader, num_heads: int) -> GatedDeltaNetShape:
    """The low-rank inputs of decays and output gates are as wide as a head."""
    bound = reader.number("kda.gate_lower_bound", -1e3, 0.0)  # 0: there is none
    heads = replace(kimi_delta_heads(reader, num_heads), decay_bound=bound)
    return GatedDeltaNetShape(heads, merged_gates=False, gate_rank=heads.key_dim)


def _attention(reader: ShapeReader, num_heads: int) -> LatentAttentionShape:
    reader.only("rope.dimension_count", 0)
    rank = reader.integer("attention.kv_lora_rank", 1, 1024)
    reader.only("attention.key_length", rank)
    reader.only("attention.value_length", rank)
    key_length = reader.integer("attention.key_length_mla", 1, 2048)
    return LatentAttentionShape(
        num_heads=num_heads,
        q_rank=reader.integer("attention.q_lora_rank", 1, 1 << 16),
        rank=rank,
        nope_dim=key_length,
        rotary_dim=0,
        value_dim=reader.integer("attention.value_length_mla", 1, 2048),
        scale=key_length**-0.5,
        latent_eps=reader.rms_eps(),
        has_positions=False,
        indexer=_indexer(reader),
    )


def _indexer(reader: ShapeReader) -> IndexerShape:
    pooled = reader.integer("attention.indexer.kpool", 2, MOST_POOLED)
    top = reader.integer("attention.indexer.top_k", pooled, 1 << 24)
    if top % pooled:
        raise reader.error("attention.indexer.top_k", f"is {top}; it must be whole blocks of {pooled} keys")
    if not reader.flag("attention.indexer.kpool_select_tail", default=True):
        raise reader.error(
            "attention.indexer.kpool_select_tail",
            "is false; only models that attend to their tail are supported",
        )
    return IndexerShape(
        num_heads=reader.integer("attention.indexer.head_count", 1, 1024),
        dim=reader.integer("attention.indexer.key_length", 32, 1024),
        top=top // pooled,
        in_pairs=False,
        pooled=pooled,
    )


def _check_own_indexers(reader: ShapeReader, recurrent: list[bool]) -> None:
    """Raises ModelError unless each attending layer has an indexer. transformers lets a layer use the choice of the
    layer just before it, but here that layer does not attend."""
    if not reader.has(n.INDEXER_TYPES):
        return
    for index, (has_own, is_recurrent) in enumerate(
        zip(reader.flags(n.INDEXER_TYPES), recurrent, strict=True)
    ):
        if not has_own and not is_recurrent:
            raise reader.error(
                n.INDEXER_TYPES, f"gives layer {index} no indexer of its own, which is not supported"
            )


def _feed_forwards(reader: ShapeReader) -> list[MoeShape | DenseFfnShape]:
    routed, others = (reader.layer_limits(f"swiglu_clamp_{which}") for which in ("exp", "shexp"))
    mixtures = reader.sigmoid_mixtures(normalize=True)
    return [
        _clamped(ffn, limit, of_others)
        for ffn, limit, of_others in zip(mixtures, routed, others, strict=True)
    ]


def _clamped(
    ffn: MoeShape | DenseFfnShape, routed: float | None, others: float | None
) -> MoeShape | DenseFfnShape:
    """Clamps the gates of routed experts, and those of the feed-forwards that all tokens pass; None: not."""
    if isinstance(ffn, DenseFfnShape):
        return ffn if others is None else replace(ffn, activation="clamped_silu", limit=others)
    shared = ffn.shared
    if shared is not None and others is not None:
        shared = replace(shared, activation="clamped_silu", limit=others)
    ffn = replace(ffn, shared=shared)
    return ffn if routed is None else replace(ffn, activation="clamped_silu", limit=routed)


FAMILY = ModelFamily("glm5-next", read_shape, hugging_face=MAPPING, has_next_token_block=True)
EARLIER_FAMILY = ModelFamily("glm5next", read_shape, has_next_token_block=True)
