"""Information about a model for listings: number of parameters and quantisation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Final

from moeserve.models.sources.source import ModelSource

# Names of `general.file_type`: `enum llama_ftype` in llama.cpp's include/llama.h.
FILE_TYPES: Final = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    architecture: str = ""
    parameters: int = 0
    quantization: str = ""  # the file's own name for it, or the type of most parameters

    @property
    def size(self) -> str:
        """The number of parameters as text, such as 30.5B."""
        for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
            if self.parameters >= unit:
                return f"{self.parameters / unit:.1f}{letter}"
        return str(self.parameters)


UNKNOWN: Final = ModelFacts()


def facts_of(source: ModelSource) -> ModelFacts:
    """Returns the facts; the source may lack weights."""
    by_type: Counter[str] = Counter()
    for tensor in source.tensors.values():
        by_type[tensor.type.name] += prod(tensor.shape)
    number = source.metadata.get("general.file_type")
    named = FILE_TYPES.get(number) if isinstance(number, int) else None
    return ModelFacts(
        source.architecture, by_type.total(), named or next((n for n, _ in by_type.most_common(1)), "")
    )
