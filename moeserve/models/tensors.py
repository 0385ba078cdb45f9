"""The tensors that a model's shape implies: names, dimensions, and the check that a file has them. No torch."""

from __future__ import annotations

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import ModelError, SettingError
from moeserve.models.feed_forward import DenseFfnShape, MoeShape
from moeserve.models.interface import LayerShape, ModelShape
from moeserve.models.latent import AttentionForm
from moeserve.models.residual import HyperConnections
from moeserve.models.sources.gguf import TensorInfo
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource
from moeserve.quantization.table import I32

# Tensors of the per-layer embeddings: the token table, the projection of embeddings, and the norm of its output.
LAYER_INPUTS = (n.LAYER_INPUT_EMBD, n.LAYER_INPUT_MODEL_PROJ, n.LAYER_INPUT_PROJ_NORM)


def expert_tensors(shape: ModelShape, layer: int) -> tuple[str, ...]:
    """Returns the names of the tensors of a layer's routed experts: gate, up and down, or without gates up and down;
    none of a layer without experts."""
    moe = shape.loaded_layers[layer].moe
    return () if moe is None else tuple(n.of_layer(layer, part) for part in dict.fromkeys(moe.parts))


def has_experts_in_file(source: ModelSource, shape: ModelShape) -> bool:
    """Returns whether a file has all routed experts in the form in which they are computed."""
    names = [name for layer in range(shape.num_layers) for name in expert_tensors(shape, layer)]
    return all(source.experts_in_file(name) is not None for name in names)


def expert_bias_tensors(layer: int) -> tuple[str, str, str]:
    """Returns the names of the bias tensors of a layer's routed experts: gate, up and down."""
    gate, up, down = (n.bias_of_layer(layer, part) for part in n.EXPERT_PARTS)
    return gate, up, down


def dense_tensors(shape: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    """The layer's tensors outside the routed experts, by name, with their row-major shapes: matrices [out, in]."""
    of_layer = shape.loaded_layers[layer]
    parts: dict[str, tuple[int, ...]] = {}
    if of_layer.mixer is not None:
        parts |= _input_tensors(shape, layer, n.HC_ATTN, n.ATTN_NORM)
    if of_layer.ffn is not None and not of_layer.is_parallel:
        parts |= _input_tensors(shape, layer, n.HC_FFN, of_layer.ffn_norm)
    if shape.ngrams is not None and shape.ngrams.layer == layer:
        parts |= shape.ngrams.tensors(shape.hidden_size, shape.residual_width)
    if isinstance(of_layer.mixer, AttentionShape):
        parts |= _attention_tensors(shape.hidden_size, of_layer.mixer)
    elif of_layer.mixer is not None:
        parts |= of_layer.mixer.tensors(shape.hidden_size)
    if of_layer.beside is not None:
        parts |= of_layer.beside.tensors(shape.hidden_size)
    if of_layer.is_sandwiched:
        parts |= _sandwich_tensors(shape.hidden_size, of_layer)
    if of_layer.has_factor:
        parts[n.of_part(n.LAYER_OUTPUT_SCALE)] = (1,)
    if shape.layer_input_width:
        parts[n.of_part(n.LAYER_INPUT_GATE)] = (shape.layer_input_width, shape.hidden_size)
        parts[n.of_part(n.LAYER_INPUT_PROJ)] = (shape.hidden_size, shape.layer_input_width)
        parts[n.of_part(n.LAYER_INPUT_NORM)] = (shape.hidden_size,)
    if isinstance(of_layer.ffn, DenseFfnShape):
        parts |= _ffn_tensors(shape.hidden_size, of_layer.ffn.width, of_layer.ffn.parts)
    elif of_layer.ffn is not None:
        parts |= _router_tensors(shape.hidden_size, shape.vocab_size, of_layer.ffn)
    return {n.in_layer(layer, name): dimensions for name, dimensions in parts.items()}


def _input_tensors(shape: ModelShape, layer: int, block: str, norm: str) -> dict[str, tuple[int, ...]]:
    """Returns the tensors between the residual and a block's input: the norm, the mix of several streams, or both."""
    has_norm = shape.loaded_layers[layer].has_input_norms
    of_norm: dict[str, tuple[int, ...]] = {n.of_part(norm): (shape.hidden_size,)} if has_norm else {}
    streams = shape.streams_of(layer)
    if streams is None:
        return of_norm
    of_streams = streams.tensors(shape.hidden_size, block)
    return of_streams | ({} if isinstance(streams, HyperConnections) else of_norm)


def head_inputs(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Returns the tensors between the residual and the head, with their shapes."""
    of_norm: dict[str, tuple[int, ...]] = {n.OUTPUT_NORM: (shape.hidden_size,)}
    if shape.streams is None:
        return of_norm
    of_streams = shape.streams.tensors(shape.hidden_size, n.OUTPUT_HC, injects=False)
    return of_streams | ({} if isinstance(shape.streams, HyperConnections) else of_norm)


def unloaded_tensors(shape: ModelShape) -> frozenset[str]:
    """Returns the tensors that stay in the file; their rows are read when tokens need them."""
    return frozenset() if shape.ngrams is None else frozenset({n.LAYER_INPUT_EMBD})


def id_tensors(shape: ModelShape) -> frozenset[str]:
    """Returns the tensors that hold expert ids, which are looked up and never multiplied."""
    layers = enumerate(shape.loaded_layers)
    by_token = (index for index, layer in layers if layer.moe is not None and layer.moe.by_token)
    return frozenset(n.of_layer(index, n.EXPERTS_BY_TOKEN) for index in by_token)


def _attention_tensors(hidden: int, a: AttentionShape) -> dict[str, tuple[int, ...]]:
    q, kv = a.q_width, a.kv_width
    rows_of = {n.ATTN_Q: a.q_rows, n.ATTN_K: kv, n.ATTN_V: a.value_width}
    rows = {part: rows_of[part] for part in a.qkv_parts}
    parts: dict[str, tuple[int, ...]] = {n.of_part(part): (out, hidden) for part, out in rows.items()}
    parts[n.of_part(n.ATTN_OUTPUT)] = (hidden, a.output_width)
    if a.has_gate_matrix:
        parts[n.of_part(n.ATTN_GATE)] = (a.gate_width, hidden)
    if a.qk_norm in ("head", "full"):
        norms = (a.head_dim, a.head_dim) if a.qk_norm == "head" else (q, kv)
        parts |= {n.of_part(n.ATTN_Q_NORM): norms[:1]}
        if a.kv_from is None:
            parts |= {n.of_part(n.ATTN_K_NORM): norms[1:]}
    if a.qkv_bias:
        parts |= {n.bias_of_part(part): (out,) for part, out in rows.items()}
    if a.output_bias:
        parts[n.bias_of_part(n.ATTN_OUTPUT)] = (hidden,)
    if a.indexer is not None:
        parts |= a.indexer.tensors(hidden)
    if a.has_sinks:
        parts[n.of_part(n.ATTN_SINKS)] = (a.num_heads,)
    return parts


def _sandwich_tensors(hidden: int, layer: LayerShape) -> dict[str, tuple[int, ...]]:
    norms = [n.POST_ATTENTION_NORM, n.POST_FFW_NORM]
    if layer.moe is not None and layer.moe.parts_normed:
        norms += [n.POST_FFW_NORM_1, n.PRE_FFW_NORM_2, n.POST_FFW_NORM_2]
    return {n.of_part(norm): (hidden,) for norm in norms}


def _router_tensors(hidden: int, vocab: int, moe: MoeShape) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of the router and of the shared expert."""
    parts: dict[str, tuple[int, ...]] = {n.of_part(n.FFN_GATE_INP): (moe.num_experts, hidden)}
    if moe.latent:
        into, back = moe.latent_parts
        parts[n.of_part(into)] = (moe.latent, hidden)
        parts[n.of_part(back)] = (hidden, moe.latent)
    if moe.latent_norm:
        parts[n.of_part(moe.latent_norm)] = (moe.latent,)
    if moe.router_bias:
        parts[n.bias_of_part(n.FFN_GATE_INP)] = (moe.num_experts,)
    if moe.choice_bias:
        parts[n.bias_of_part(n.EXP_PROBS_B)] = (moe.num_experts,)
    if moe.by_token:
        parts[n.of_part(n.EXPERTS_BY_TOKEN)] = (vocab, moe.top_k)
    if moe.parts_normed:
        parts[n.scale_of_part(n.FFN_GATE_INP)] = (hidden,)
    if moe.expert_scale:
        parts[n.scale_of_part(n.FFN_DOWN_EXPS)] = (moe.num_experts,)
    if moe.shared is not None:
        parts |= _ffn_tensors(hidden, moe.shared.width, moe.shared.parts)
        if moe.shared.is_gated:
            parts[n.of_part(n.FFN_GATE_INP_SHEXP)] = (hidden,)
    return parts


def _ffn_tensors(hidden: int, width: int, names: tuple[str, str, str]) -> dict[str, tuple[int, ...]]:
    gate, up, down = (n.of_part(name) for name in names)
    return {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}


def model_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model with its row-major shape: matrices [out, in], experts [E, out, in]."""
    hidden = shape.hidden_size
    tensors: dict[str, tuple[int, ...]] = {
        n.TOKEN_EMBD: (shape.vocab_size, hidden),
        **head_inputs(shape),
    }
    if shape.ngrams is not None:
        tensors[n.LAYER_INPUT_EMBD] = (shape.ngrams.table_rows, shape.ngrams.head_width)
    if not shape.tied_embeddings:
        tensors[n.OUTPUT] = (shape.vocab_size, hidden)
    if shape.layer_input_width:
        inputs = shape.num_layers * shape.layer_input_width
        widths: tuple[tuple[int, ...], ...] = (
            (shape.vocab_size, inputs),
            (inputs, hidden),
            (shape.layer_input_width,),
        )
        tensors |= dict(zip(LAYER_INPUTS, widths, strict=True))
    with_factors = [form for form in shape.forms if form.has_rope_factors]
    if with_factors:
        tensors |= dict.fromkeys(rope_factor_tensors(shape), (_num_factors(shape, with_factors[0]),))
    for index, layer in enumerate(shape.loaded_layers):
        tensors |= dense_tensors(shape, index)
        if layer.moe is None:
            continue
        experts, width, outer = layer.moe.num_experts, layer.moe.width, layer.moe.latent or hidden
        matrices = ((width, outer), (width, outer), (outer, width))
        of_experts = zip((n.of_layer(index, part) for part in layer.moe.parts), matrices, strict=True)
        tensors |= {name: (experts, *matrix) for name, matrix in of_experts}
        if layer.moe.expert_bias:
            biases = zip(expert_bias_tensors(index), matrices, strict=True)
            tensors |= {name: (experts, out) for name, (out, _) in biases}
    if shape.next_token_layer is not None:
        tensors |= next_token_tensors(shape)
    return tensors


def rope_factor_tensors(shape: ModelShape) -> tuple[str, ...]:
    """Returns the names of the tensors of frequencies' divisors: one, or LongRoPE's two."""
    is_long = shape.rope_scaling.type == "longrope"
    return (n.SHORT_ROPE_FACTORS, n.LONG_ROPE_FACTORS) if is_long else (n.ROPE_FREQS,)


def _num_factors(shape: ModelShape, form: AttentionForm) -> int:
    dimensions = form.rotary_dim if shape.rope_scaling.type == "longrope" else form.head_dim
    return dimensions // 2


def unused_tensors(shape: ModelShape) -> frozenset[str]:
    """Returns tensors that a file may contain and that are not used: k and v of layers that use an earlier layer's,
    and the indexer if contexts never exceed the number of keys that it chooses."""
    return frozenset(
        n.in_layer(index, name) for index, layer in enumerate(shape.layers) for name in _unused_by(layer)
    )


def _unused_by(layer: LayerShape) -> tuple[str, ...]:
    if isinstance(layer.mixer, AttentionShape) and layer.mixer.kv_from is not None:
        return *layer.unused, *(n.of_part(part) for part in (n.ATTN_K, n.ATTN_V, n.ATTN_K_NORM))
    return layer.unused


def check_tensors(shape: ModelShape, source: ModelSource) -> None:
    """Checks that exactly the expected tensors exist, with the expected shapes. Raises ModelError."""
    expected, unused = model_tensors(shape), unused_tensors(shape)
    for name, dimensions in expected.items():
        tensor = source.tensors.get(name)
        if tensor is None:
            raise ModelError(
                source.path,
                f"tensor {name!r} is missing; the file is incomplete, download or convert it again",
            )
        _check_tensor(source, tensor, dimensions)
    skipped = range(shape.num_layers, shape.num_layers + shape.num_skipped_layers)
    for name in source.tensors:
        # Ignoring a tensor, a bias for example, would silently change every answer.
        if name not in expected and name not in unused and n.layer_of(name) not in skipped:
            raise SettingError(
                source.path, f"tensor {name!r} has no place in architecture {shape.architecture!r}"
            )


def _check_tensor(source: ModelSource, tensor: TensorInfo, dimensions: tuple[int, ...]) -> None:
    if tensor.name.endswith(n.of_part(n.EXPERTS_BY_TOKEN)) and int(tensor.type) != I32.number:
        raise SettingError(
            source.path,
            f"tensor {tensor.name!r} is of type {tensor.type.name}; expert ids are expected as I32",
        )
    # Some converters write leading dimensions of size one for vectors and convolutions, others a column as a vector.
    ahead = len(tensor.shape) - len(dimensions) if 1 in dimensions[1:] else 0
    is_column = dimensions[1:] == (1,) and tensor.shape == dimensions[:1]
    if tensor.shape != (1,) * ahead + dimensions and not is_column:
        raise ModelError(
            source.path,
            f"tensor {tensor.name!r} has shape {list(tensor.shape)} (outermost dimension first), "
            f"{list(dimensions)} is expected from the metadata; convert the model again",
        )
    if len(dimensions) == 1 and tensor.type.is_quantised:
        raise SettingError(
            source.path,
            f"tensor {tensor.name!r} is of type {tensor.type.name}; norms and biases are expected as F32, F16 or BF16",
        )


def next_token_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of the next-token block that are not its layer's."""
    hidden, index = shape.hidden_size, shape.num_layers
    norms = (n.NEXTN_ENORM, n.NEXTN_HNORM, shape.next_token_norm)
    parts: dict[str, tuple[int, ...]] = {n.of_layer(index, norm): (hidden,) for norm in norms}
    return parts | {n.of_layer(index, n.NEXTN_EH_PROJ): (hidden, 2 * hidden)}
