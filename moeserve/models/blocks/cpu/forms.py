"""Buffers and tables for a step on the CPU, shared by all layers with the same attention form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from moeserve.kernels.choice_rule import ChoiceRule
from moeserve.kernels.cpu_stream import AttentionPlan
from moeserve.kernels.stream_operands import Activations, Heads
from moeserve.models.attention import Attention, AttentionShape
from moeserve.models.blocks.cpu.workspace import CpuWorkspace
from moeserve.models.blocks.rope import rope_tables, section_of_frequencies
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.indexer import ChoosesKeys
from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm, LatentAttentionShape

RopeTables = tuple[Tensor, Tensor]  # cos and sin of all positions' angles: see `rope_tables`


class CpuForm:
    """Heads, angles of all positions, and views of the workspace's buffers, for one attention form. Owns the
    attention plans.

    cos, sin: float32 [positions, rotary_dim / 2].
    """

    def __init__(
        self,
        shape: Attention,
        space: CpuWorkspace,
        angles: RopeTables,
        rules: Iterable[ChoiceRule],
        sections: Tensor | None = None,
    ) -> None:
        """shape: the shape of any layer with this form. rules: which keys the layers of this form attend to. sections:
        `section_of_frequencies`, if rows have three positions."""
        tokens = len(space.x)
        self.heads = _heads_of(shape)
        self.plans = {rule: AttentionPlan() for rule in rules}  # by the layers' rule, without windows
        self.window_plan = (
            AttentionPlan()
        )  # for windowed layers that have their own KV slots, or rows with their own ends
        self.cos, self.sin = angles
        self.sections = sections
        if isinstance(shape, AttentionShape):
            self.q, self.k, self.v = (
                memory.view(-1)[: tokens * width].view(tokens, width)
                for memory, width in zip(
                    (space.q, space.k, space.v),
                    (shape.q_width, shape.kv_width, shape.value_width),
                    strict=True,
                )
            )
        self.attended = Activations(tokens, shape.output_width, within=space.widest_mixed)

    def angles_at(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns cos, sin and positions for `CpuStream.rope_store`. positions: int32 [n], or [3, n] by section."""
        if positions.dim() == 1:
            return self.cos, self.sin, positions
        assert self.sections is not None
        rows = positions.long()[self.sections].T.contiguous()  # [n, rotary_dim / 2]
        return self.cos.gather(0, rows), self.sin.gather(0, rows), None

    def row_angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin by row, float32 [n, rotary_dim / 2]. positions: as for `angles_at`."""
        if positions.dim() == 2:
            cos, sin, _ = self.angles_at(positions)
            return cos, sin
        return self.cos[positions.long()], self.sin[positions.long()]


def angles_of(
    model: ModelShape, max_model_len: int, rope_factors: Tensor | None
) -> dict[AttentionForm, RopeTables]:
    """Returns the tables of cosines and sines of RoPE for all positions below max_model_len, for each attention form of
    the model. rope_factors: divisors of the rotary frequencies, float32, see `rope_tables`."""
    return {form: rope_tables(model, max_model_len, form, rope_factors) for form in _kinds(model)}


def forms_of(
    model: ModelShape, space: CpuWorkspace, angles: Mapping[AttentionForm, RopeTables]
) -> dict[AttentionForm, CpuForm]:
    """Returns a CpuForm for each attention form of the model."""

    def sections(form: AttentionForm) -> Tensor | None:
        return None if model.rope_sections is None else section_of_frequencies(model, form.rotary_dim // 2)

    return {
        form: CpuForm(shape, space, angles[form], _rules(model, form), sections(form))
        for form, shape in _kinds(model).items()
    }


def next_token_form(
    model: ModelShape, forms: Mapping[AttentionForm, CpuForm], space: CpuWorkspace
) -> CpuForm:
    """Returns the form of the next-token block. The block shares the plans of layers that attend to the same keys;
    without such layers it gets plans of its own."""
    attention = model.loaded_layers[-1].attention
    assert isinstance(attention, ChoosesKeys)
    form = forms[attention.form]
    if attention.rule in form.plans:
        return form
    return CpuForm(attention, space, (form.cos, form.sin), [attention.rule], form.sections)


def _rules(model: ModelShape, form: AttentionForm) -> list[ChoiceRule]:
    attending = (layer.attention for layer in model.layers if layer.attention is not None)
    return [a.rule for a in attending if isinstance(a, ChoosesKeys) and a.form == form]


def _kinds(model: ModelShape) -> dict[AttentionForm, Attention]:
    return {
        layer.attention.form: layer.attention for layer in model.loaded_layers if layer.attention is not None
    }


def _heads_of(shape: Attention) -> Heads:
    if isinstance(shape, LatentAttentionShape):
        return Heads(shape.num_heads, shape.head_parts, shape.head_dim, shape.rank, is_latent=True)
    if isinstance(shape, CompressedAttentionShape):
        return Heads(shape.num_heads, shape.head_parts, shape.head_dim, is_latent=True)
    return Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.v_dim)
