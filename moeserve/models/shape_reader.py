"""Reads the parts of a `ModelShape` that all families share: metadata keys with the same meaning in every
architecture.

Keys are named as by llama.cpp's converter, prefixed with the architecture's name. All numbers are range-checked,
because buffer sizes depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moeserve.kernels.routing.options import RouterOptions, Scoring
from moeserve.models.attention import AttentionShape
from moeserve.models.errors import ModelError
from moeserve.models.feed_forward import DenseFfnShape, MoeShape, SharedExpert
from moeserve.models.interface import LayerShape, ModelShape
from moeserve.models.neutral_settings import first_overlooked
from moeserve.models.rope_scaling import RopeScaling
from moeserve.models.rope_settings import read_rope_scaling
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

MAX_TOP_K = 128  # choosing experts takes quadratic time in it; current models have at most 16


class ShapeReader:
    """Reads one model's metadata. Every method raises ModelError for a key that is missing or out of range."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._metadata = source.metadata
        self._asked: set[str] = set()  # suffixes of the keys read so far

    def integer(self, suffix: str, low: int, high: int, default: int | None = None) -> int:
        """Returns the integer under `<architecture>.<suffix>`."""
        return self._metadata.require_int(self._key(suffix), low, high, default)

    def number(self, suffix: str, low: float, high: float, default: float | None = None) -> float:
        return self._metadata.require_float(self._key(suffix), low, high, default)

    def flag(self, suffix: str, default: bool | None = None) -> bool:
        return self._metadata.require_bool(self._key(suffix), default)

    def has(self, suffix: str) -> bool:
        return self._key(suffix) in self._metadata

    def flags(self, suffix: str) -> list[bool]:
        """Reads one boolean per layer; some files have the numbers 0 and 1 instead."""
        value = self._metadata.get(self._key(suffix))
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            return [flag == 1 for flag in self.layer_integers(suffix, 0, 1)]
        return self._metadata.require_bools(self._key(suffix), self._entries(suffix))[: self.num_layers]

    def optional_flags(self, suffix: str) -> list[bool] | None:
        """Returns a flag for each layer as `flags` does; None if the key is missing."""
        return self.flags(suffix) if self._key(suffix) in self._metadata else None

    def layer_integers(self, suffix: str, low: int, high: int) -> list[int]:
        """Reads one integer per layer; a single number holds for all."""
        if isinstance(self._metadata.get(self._key(suffix)), int):
            return [self.integer(suffix, low, high)] * self.num_layers
        found = self._metadata.require_ints(self._key(suffix), self._entries(suffix))
        values = [int(each) for each in found[: self.num_layers]]
        self._check_range(suffix, values, low, high)
        return values

    def integers(self, suffix: str, low: int, high: int, most: int) -> list[int]:
        """Reads 1 to `most` integers."""
        value = self._metadata.get(self._key(suffix))
        length = min(max(len(value), 1), most) if isinstance(value, np.ndarray) else most
        values = [int(each) for each in self._metadata.require_ints(self._key(suffix), length)]
        self._check_range(suffix, values, low, high)
        return values

    def layer_limits(self, suffix: str) -> list[float | None]:
        """Reads a limit per layer; None for layers where it is 0, and for all layers if the key is missing."""
        return self._limits(suffix)[: self.num_layers]

    def next_token_limit(self, suffix: str) -> float | None:
        """Returns the activation limit of the first next-token layer: the key's entry after the entries of the model's
        layers; None if the key has no such entry."""
        return next(iter(self._limits(suffix)[self.num_layers :]), None)

    def next_token_has_window(self) -> bool | None:
        """Reads whether the first next-token layer has a window; None: the file does not say."""
        if self.has(n.NEXT_TOKEN_WINDOWED):
            return self.flag(n.NEXT_TOKEN_WINDOWED)
        value = self._metadata.get(self._key(n.WINDOWED_LAYERS))
        if not isinstance(value, np.ndarray) or self._entries(n.WINDOWED_LAYERS) == self.num_layers:
            return None
        return bool(value[self.num_layers])

    def _limits(self, suffix: str) -> list[float | None]:
        if self._key(suffix) not in self._metadata:
            return [None] * self.num_layers
        found = self._metadata.require_floats(self._key(suffix), self._entries(suffix))
        values = [float(each) for each in found]
        self._check_range(suffix, values, 0.0, 1e6)
        return [value or None for value in values]

    def _check_range(self, suffix: str, values: Sequence[float], low: float, high: float) -> None:
        for value in values:
            if not low <= value <= high:
                raise self.error(suffix, f"has {value}; {low} to {high} is supported")

    def _entries(self, suffix: str) -> int:
        """Returns the length of a per-layer array, which may include layers that are not run."""
        value = self._metadata.get(self._key(suffix))
        has_all = isinstance(value, np.ndarray) and len(value) == self._num_blocks
        return self._num_blocks if has_all else self.num_layers

    def only(self, suffix: str, value: int) -> None:
        """Raises ModelError if the key exists with another value than the only supported one."""
        self.integer(suffix, value, value, default=value)

    def activation(self, *names: str) -> None:
        """Checks the activation: raises ModelError if the file states one that has none of these names."""
        suffix = "hidden_activation"
        value = self._metadata.require_str(self._key(suffix), default=names[0])
        if value not in names:
            raise self.error(suffix, f"is {value!r:.80}; only {' or '.join(map(repr, names))} is supported")

    def error(self, suffix: str, problem: str) -> ModelError:
        return self._metadata.error(self._key(suffix), problem)

    @property
    def hidden_size(self) -> int:
        return self.integer("embedding_length", 1, 1 << 16)

    @property
    def num_layers(self) -> int:
        """Number of layers that are run; the key counts next-token layers as well."""
        return self._num_blocks - self._num_skipped_layers

    @property
    def _num_blocks(self) -> int:
        return self.integer("block_count", 1, 1024)

    @property
    def _num_skipped_layers(self) -> int:
        return self.integer(n.NEXTN_LAYERS, 0, self._num_blocks - 1, default=0)

    def heads(self, *, rotates_whole: bool = True, num_kv_heads: int | None = None) -> tuple[int, int, int]:
        """Returns the numbers of query heads and KV heads, and the head dimension, read from the metadata.
        rotates_whole: RoPE must rotate the whole head; if False, `rotated` reads how many dimensions rotate.
        num_kv_heads: the layer's number, if layers differ; None: it is read. Raises ModelError for numbers that are out
        of range, that do not divide one another, or an odd head dimension."""
        num_heads = self.integer("attention.head_count", 1, 1024)
        if num_kv_heads is None:
            num_kv_heads = self.integer("attention.head_count_kv", 1, num_heads, default=num_heads)
        head_dim = self.integer("attention.key_length", 2, 1024, default=self.hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise self.error(
                "attention.head_count_kv", f"is {num_kv_heads}; it must divide the {num_heads} heads"
            )
        if head_dim % 2:
            raise self.error("attention.key_length", f"is {head_dim}; RoPE needs an even number")
        self.only("attention.value_length", head_dim)
        if rotates_whole:
            self.only("rope.dimension_count", head_dim)
        return num_heads, num_kv_heads, head_dim

    def layer_heads(self) -> list[tuple[int, int]]:
        """Reads (query heads, KV heads) of each layer."""
        heads = self.layer_integers("attention.head_count", 1, 1024)
        kv_heads = self.layer_integers("attention.head_count_kv", 1, 1024)
        for num, num_kv in zip(heads, kv_heads, strict=True):
            if num % num_kv:
                raise self.error("attention.head_count_kv", f"has {num_kv}; it must divide the {num} heads")
        return list(zip(heads, kv_heads, strict=True))

    def rotated(self, head_dim: int, suffix: str = "rope.dimension_count") -> int:
        """Reads how many leading dimensions of a head rotate."""
        rotated = self.integer(suffix, 2, head_dim, default=head_dim)
        if rotated % 2:
            raise self.error(suffix, f"is {rotated}; RoPE needs an even number")
        return rotated

    def recurrent_layers(self) -> list[bool]:
        """Reads which of the layers are recurrent; at least one must attend."""
        suffix = "attention.recurrent_layers"
        interval = self.integer("full_attention_interval", 1, 1024, default=4)
        if self._key(suffix) in self._metadata:
            recurrent = self.flags(suffix)
        else:
            recurrent = [(layer + 1) % interval != 0 for layer in range(self.num_layers)]
        if all(recurrent):
            raise self.error(suffix, "has no attention layer, which is not supported")
        return recurrent

    def windowed(
        self, attention: AttentionShape, period: int = 1, default: int | None = None
    ) -> list[AttentionShape]:
        """Returns each layer's attention with its window. period: without a key for it, all but the last of every
        `period` layers have windows, as in llama.cpp; 1: no layer has one. default: the window without a key."""
        value = self._metadata.get(self._key(n.WINDOWED_LAYERS))
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            period = self.integer(n.WINDOWED_LAYERS, 1, 1024, default=period)
            sees = [layer % period < period - 1 for layer in range(self.num_layers)]
        else:
            sees = self.flags(n.WINDOWED_LAYERS)
        if not any(sees):
            return [attention] * self.num_layers
        window = replace(attention, window=self.integer(n.SLIDING_WINDOW, 1, 1 << 24, default=default))
        return [window if seen else attention for seen in sees]

    def feed_forwards(self, moe: MoeShape) -> list[MoeShape | DenseFfnShape]:
        """Returns each layer's feed-forward: experts, or a single one."""
        is_dense = self._dense_layers()
        dense = DenseFfnShape(self.dense_width()) if any(is_dense) else None
        return [moe if dense is None or not without else dense for without in is_dense]

    def _dense_layers(self) -> list[bool]:
        """Returns which layers have no experts, according to the GGUF's tensors. Keys, if present, must agree."""
        said = self.optional_flags(n.DENSE_LAYERS)
        tensors = self._source.tensors
        is_dense = said or [
            n.of_layer(layer, n.FFN_GATE_INP) not in tensors and n.of_layer(layer, n.FFN_GATE) in tensors
            for layer in range(self.num_layers)
        ]
        leading = self.integer("leading_dense_block_count", 0, self.num_layers, default=0)
        step = self.integer("interleave_moe_layer_step", 0, 1024, default=0) or 1
        for layer, dense in enumerate(is_dense):
            if layer < leading and not dense:
                raise self.error("leading_dense_block_count", f"is {leading}, and layer {layer} has experts")
            if step > 1 and dense != ((layer + 1) % step != 0 or layer < leading):
                kind = "no experts" if dense else "experts"
                raise self.error("interleave_moe_layer_step", f"is {step}, and layer {layer} has {kind}")
        return is_dense

    def qkv_bias(self, part: str = n.ATTN_Q) -> bool:
        """Returns whether q, k and v have biases. In a GGUF they have if the bias tensor of `part` exists."""
        return self._attention_bias(part)

    def output_bias(self) -> bool:
        """Returns whether attention's output has a bias, in families whose config.json has one setting for q, k, v and
        output."""
        return self._attention_bias(n.ATTN_OUTPUT)

    def _attention_bias(self, part: str) -> bool:
        if self._key(n.HAS_QKV_BIAS) in self._metadata:
            return self.flag(n.HAS_QKV_BIAS)
        return any(n.bias_of_layer(layer, part) in self._source.tensors for layer in range(self.num_layers))

    def experts(self, width: str = "expert_feed_forward_length") -> tuple[int, int, int]:
        """Reads the number of experts, experts per token, and an expert's width, from the key `width`."""
        num_experts = self.integer("expert_count", 1, 4096)
        top_k = self.integer("expert_used_count", 1, min(num_experts, MAX_TOP_K))
        return num_experts, top_k, self.integer(width, 1, 1 << 16)

    def sigmoid_mixtures(self, *, normalize: bool = False) -> list[MoeShape | DenseFfnShape]:
        """Returns each layer's feed-forward as in DeepSeek-V3: first layers without experts, then sigmoid routers,
        with a choice bias if present, and an ungated shared expert. normalize: default for normalising weights."""
        num_experts, top_k, width = self.experts()
        count = self.integer("expert_shared_count", 0, 64, default=0)
        shared = self.integer("expert_shared_feed_forward_length", 0, 1 << 20, default=0) or count * width
        return self.feed_forwards(
            MoeShape(
                num_experts,
                top_k,
                width,
                self.sigmoid_router(num_experts, top_k, normalize=normalize),
                shared=SharedExpert(shared, is_gated=False) if shared else None,
                choice_bias=self.has_choice_bias(),
            )
        )

    def has_choice_bias(self) -> bool:
        """Returns whether the file has a choice bias: one that is added to scores for choosing experts, not to their
        weights."""
        return any(
            n.bias_of_layer(layer, n.EXP_PROBS_B) in self._source.tensors for layer in range(self.num_layers)
        )

    def sigmoid_router(self, num_experts: int, top_k: int, *, normalize: bool = False) -> RouterOptions:
        """Returns DeepSeek-V3's router: sigmoid scores, possibly in groups. normalize: default for normalising
        weights."""
        self.only("expert_gating_func", 2)  # llama.cpp's number for the sigmoid
        return self.grouped_router("sigmoid", num_experts, top_k, normalize=normalize)

    def grouped_router(
        self, scoring: Scoring, num_experts: int, top_k: int, *, normalize: bool = False
    ) -> RouterOptions:
        groups = self.integer("expert_group_count", 1, num_experts, default=1)
        options = RouterOptions(
            scoring=scoring,
            normalize=self.flag("expert_weights_norm", default=normalize),
            scale=self.number("expert_weights_scale", 0.0, 1e6, default=0.0)
            or 1.0,  # 0 means that the key is unset
            groups=groups,
            top_groups=self.integer("expert_group_used_count", 1, groups, default=groups),
        )
        try:
            options.check(num_experts, top_k)
        except ValueError as problem:
            raise self.error("expert_group_count", f"does not fit: {problem}") from problem
        return options

    def dense_width(self) -> int:
        """Width of the feed-forward of a layer without experts."""
        return self.integer("feed_forward_length", 1, 1 << 20)

    def model(
        self,
        layers: tuple[LayerShape, ...],
        *,
        yarn_truncates: bool = True,
        rope_scaling: RopeScaling | None = None,
        embedding_scale: float = 1.0,
        logit_softcap: float = 0.0,
        logit_scale: float = 1.0,
        rope_theta: float | None = None,
        rope_sections: tuple[int, int, int] | None = None,
        sections_in_blocks: bool = False,
        layer_input_width: int = 0,
        spans_see_ahead: bool = False,
        full_layers_see_ahead: bool = False,
        rms_eps: float | None = None,
        vocab_size: int | None = None,
    ) -> ModelShape:
        """Returns the shape of a decoder with these layers. yarn_truncates, rope_theta, rms_eps: values if the file has
        no key. The other arguments are fields of ModelShape. Raises ModelError for a missing or unsupported setting.
        rope_scaling: overrides the keys. vocab_size: of a file without a vocabulary."""
        if vocab_size is None:
            vocab_size = len(self._metadata.require_strings("tokenizer.ggml.tokens"))
            self.only("vocab_size", vocab_size)
        self._refuse_overlooked(layers)
        return ModelShape(
            architecture=self._source.architecture,
            hidden_size=self.hidden_size,
            layers=layers,
            rms_eps=self.rms_eps(rms_eps),
            rope_theta=self.number("rope.freq_base", 2.0, 1e12, default=rope_theta),
            rope_scaling=rope_scaling or self.rope_scaling(yarn_truncates=yarn_truncates),
            context_length=self._context_length,
            vocab_size=vocab_size,
            tied_embeddings=n.OUTPUT not in self._source.tensors,
            num_skipped_layers=self._num_skipped_layers,
            embedding_scale=embedding_scale,
            logit_softcap=logit_softcap,
            logit_scale=logit_scale,
            rope_sections=rope_sections,
            sections_in_blocks=sections_in_blocks,
            layer_input_width=layer_input_width,
            spans_see_ahead=spans_see_ahead,
            full_layers_see_ahead=full_layers_see_ahead,
        )

    def rms_eps(self, default: float | None = None) -> float:
        return self.number("attention.layer_norm_rms_epsilon", 1e-12, 1e-2, default=default)

    def rope_sections(self, rotary_dim: int, *, in_blocks: bool = False) -> tuple[int, int, int] | None:
        """Reads ModelShape.rope_sections; None if the file has none. in_blocks: ModelShape.sections_in_blocks."""
        name = "rope.dimension_sections"
        key = self._key(name)
        if key not in self._metadata:
            return None
        time, height, width, *rest = self._metadata.require_ints(key, 4).tolist()
        is_ordered = min(time, height, width) > 0 if in_blocks else time >= height >= width > 0
        if time + height + width != rotary_dim // 2 or any(rest) or not is_ordered:
            raise self.error(
                name, f"is {[time, height, width, *rest]}, which {rotary_dim} dimensions do not have"
            )
        return time, height, width

    @property
    def _context_length(self) -> int:
        return self.integer("context_length", 1, 1 << 24)

    def rope_scaling(self, *, yarn_truncates: bool = True) -> RopeScaling:
        """Reads the RoPE scaling. yarn_truncates: value if the file has no key."""
        return read_rope_scaling(
            self._metadata, self._source.architecture, self._context_length, yarn_truncates=yarn_truncates
        )

    def _refuse_overlooked(self, layers: tuple[LayerShape, ...]) -> None:
        """Raises ModelError for a setting that changes the computation but that the family's code did not read."""
        prefix, read = f"{self._source.architecture}.", frozenset(self._asked)
        given = {
            key.removeprefix(prefix): self._metadata[key] for key in self._metadata if key.startswith(prefix)
        }
        has_windows = any(isinstance(each.mixer, AttentionShape) and each.mixer.window > 0 for each in layers)
        overlooked = first_overlooked(given, read, self._context_length, has_windows=has_windows)
        if overlooked is not None:
            value = given[overlooked]
            raise self.error(overlooked, f"is {value!r:.80}; this architecture is supported only without it")
        recurrent = "attention.recurrent_layers"
        if recurrent not in read and self.has(recurrent):
            for layer, (said, shape) in enumerate(zip(self.flags(recurrent), layers, strict=True)):
                if said != (shape.recurrence is not None):
                    raise self.error(recurrent, f"says {said} of layer {layer}, and the other keys do not")

    def _key(self, suffix: str) -> str:
        self._asked.add(suffix)
        return f"{self._source.architecture}.{suffix}"
