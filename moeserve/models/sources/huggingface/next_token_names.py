"""The names of a next-token block's tensors (models/next_token.py) in checkpoints, which have it in one of two places:

    behind the last layer   model.layers.N.eh_proj.weight beside model.layers.N.self_attn..., N = num_hidden_layers
    apart                   mtp.fc.weight beside mtp.layers.0.self_attn...

Tensors of the second form are renamed to the first form, so that both are read alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moeserve.models.sources.gguf import names as n

from .safetensors_file import StoredTensor


@dataclass(frozen=True, slots=True)
class NextTokenNames:
    """The names of one family."""

    parts: Mapping[
        str, str
    ]  # GGUF name within the layer -> checkpoint's, behind "model.layers.N." or a prefix
    prefixes: tuple[str, ...] = ()  # each stands for "model.layers.N."; the first that fits counts
    renamed: Mapping[str, str] = field(default_factory=dict)  # beginnings of names behind "model.layers.N."

    def appended(self, stored: dict[str, StoredTensor], layers: int) -> dict[str, StoredTensor] | None:
        """Returns the tensors, with the block's tensors renamed to those of layer `layers`; None if there is no
        block."""
        behind = f"model.layers.{layers}."
        names = {name: self._renamed(name, behind) for name in stored}
        if behind + self.parts[n.of_part(n.NEXTN_EH_PROJ)] not in names.values():
            return None
        return {new: replace(stored[old], name=new) for old, new in names.items()}

    def _renamed(self, name: str, behind: str) -> str:
        prefix = next((prefix for prefix in (*self.prefixes, behind) if name.startswith(prefix)), None)
        if prefix is None:
            return name
        part = name.removeprefix(prefix)
        old = next((old for old in self.renamed if part.startswith(old)), "")
        return behind + self.renamed.get(old, "") + part.removeprefix(old)


def _parts(eh_proj: str, enorm: str, hnorm: str, head_norm: str) -> dict[str, str]:
    ours = (n.NEXTN_EH_PROJ, n.NEXTN_ENORM, n.NEXTN_HNORM, n.NEXTN_HEAD_NORM)
    theirs = (eh_proj, enorm, hnorm, head_norm)
    return {n.of_part(one): f"{other}.weight" for one, other in zip(ours, theirs, strict=True)}


# DeepSeek-V3's form, the same as Step-3.5 nests it, and with Hunyuan's and MiMo's name of the last norm.
BEHIND_LAYERS = NextTokenNames(_parts("eh_proj", "enorm", "hnorm", "shared_head.norm"))
NESTED = replace(BEHIND_LAYERS, renamed={"transformer.": ""})
WITH_FINAL_NORM = NextTokenNames(_parts("eh_proj", "enorm", "hnorm", "final_layernorm"))
MIMO = replace(
    WITH_FINAL_NORM,
    prefixes=("model.mtp.layers.0.",),
    renamed={"pre_mlp_layernorm.": "post_attention_layernorm."},
)
# Qwen3-Next's form.
APART = NextTokenNames(
    _parts("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), ("mtp.layers.0.", "mtp.")
)
