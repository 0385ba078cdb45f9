"""A model's own next-token block (MTP, `nextn`), which drafts.

Row q of the block, for the token at position q > 0:

    x = eh_proj [enorm(embedding of token q), hnorm(the model's hidden state at q - 1, after the output norm)]
    x = the block's decoder layer (x), at position q - 1, attending to rows 1 .. q
    logits = output(shared_head_norm(x))        of the token at q + 1

The row after a draft uses the block's normalised output instead of the model's state. In Step-3.5 both are read before
their norms. The block's residual is one vector also where the model's is several streams, whose mean it reads then. A
row depends only on tokens up to its own, so its keys and values are kept in the KV slot of position q, and a cached
prefix includes them.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.errors import ModelError
from moeserve.models.interface import LayerShape, ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.registry import FAMILIES
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import check_tensors


def drafting_shape(shape: ModelShape, source: ModelSource, method: str | None) -> ModelShape:
    """Returns the shape, including the next-token block if `method` (of --speculative-config; None: no drafts) uses it;
    "auto" does without a block that cannot draft, see `next_token_fault`. Raises ModelError for "mtp" if the file has
    no whole block."""
    wants = method == "auto" and _has_part(shape, source) and next_token_fault(shape, source) is None
    return with_next_token_block(shape, source) if wants or method == "mtp" else shape


def next_token_fault(shape: ModelShape, source: ModelSource) -> ModelError | None:
    """Returns what is wrong with the file's next-token block, such as a missing part. None if nothing is wrong, if the
    file has no block, or if its family's block cannot draft."""
    if not _has_part(shape, source):
        return None
    try:
        with_next_token_block(shape, source)
    except ModelError as error:
        return error
    return None


def has_next_token_block(shape: ModelShape, source: ModelSource) -> bool:
    """Returns whether the file has a next-token block and the family's block can draft."""
    return _has_part(shape, source) and n.of_layer(shape.num_layers, n.NEXTN_EH_PROJ) in source.tensors


def _has_part(shape: ModelShape, source: ModelSource) -> bool:
    """Returns whether the file has a part of a next-token block, of a family whose block can draft."""
    family = FAMILIES.get(source.architecture)
    first, second = shape.num_layers, shape.num_layers + 1
    layers = {n.layer_of(name) for name in source.tensors}
    # llama.cpp's converter writes some blocks as two layers, which are not read.
    if second in layers and n.of_layer(second, n.NEXTN_EH_PROJ) not in source.tensors:
        return False
    return first in layers and family is not None and family.has_next_token_block


def with_next_token_block(shape: ModelShape, source: ModelSource) -> ModelShape:
    """Returns the shape with the block that drafts. Raises ModelError if the file has no such block."""
    if not _has_part(shape, source):
        served = ", ".join(name for name, family in FAMILIES.items() if family.has_next_token_block)
        raise ModelError(
            source.path,
            "no next-token block (MTP) that could draft: choose a GGUF that was converted with it (its tensors are "
            f"blk.{shape.num_layers}.nextn.*) or a folder that has it, of {served}, or draft by look-up with "
            '--speculative-config {"method": "ngram", "num_speculative_tokens": 4}',
        )
    layer = next(layer for layer in reversed(shape.layers) if layer.attention is not None)
    own = FAMILIES[source.architecture].next_token_layer
    if own is not None:
        layer = own(source, layer)
    drafting = replace(
        shape, next_token_layer=_with_own_indexer(layer), num_skipped_layers=max(shape.num_skipped_layers, 1)
    )
    check_tensors(drafting, source)
    return drafting


def _with_own_indexer(layer: LayerShape) -> LayerShape:
    """Returns the block's layer with an indexer of its own, instead of another layer's choice of keys. Where index keys
    are pooled the block attends to all keys, because its rows are stored one by one, without their neighbours."""
    mixer = layer.mixer
    if not isinstance(mixer, LatentAttentionShape) or mixer.indexer is None:
        return layer
    if mixer.indexer.is_pooled:
        return replace(layer, mixer=replace(mixer, indexer=None))
    return replace(layer, mixer=replace(mixer, indexer=replace(mixer.indexer, keys_from=None)), unused=())
