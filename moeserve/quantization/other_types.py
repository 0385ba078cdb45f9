"""Tensor types that are not read: their names, and the type that is read whose size is nearest.

Sources: `enum ggml_type` of llama.cpp's ggml/include/ggml.h, whose comments keep the numbers of removed types, and of
ik_llama.cpp's (https://github.com/ikawrakow/ik_llama.cpp), whose own types begin at 98. Number 36 was IQ4_NL_4_4 in
llama.cpp before it was removed; files with it are BitNet's, which ik_llama.cpp reads as I2_S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_GGML = "llama.cpp's"
_REMOVED = "removed from llama.cpp"
_REPACKED = "repacked for one kind of CPU and removed from llama.cpp"
_IK = "ik_llama.cpp's own"
_IK_ROWS = "ik_llama.cpp's, with interleaved rows"


@dataclass(frozen=True, slots=True)
class OtherType:
    name: str
    owner: str  # whose type it is, for messages
    instead: str  # name of the type to download instead; "" for types that hold no weights


# fmt: off
_NAMES: dict[str, dict[int, tuple[str, str]]] = {
    _GGML: {
        9: ("Q8_1", "Q8_0"), 15: ("Q8_K", "Q8_0"), 24: ("I8", ""), 25: ("I16", ""), 26: ("I32", ""), 27: ("I64", ""),
        28: ("F64", "F32"),
    },
    _REMOVED: {4: ("Q4_2", "Q4_0"), 5: ("Q4_3", "Q4_1")},
    _REPACKED: {
        31: ("Q4_0_4_4", "Q4_0"), 32: ("Q4_0_4_8", "Q4_0"), 33: ("Q4_0_8_8", "Q4_0"),
        37: ("IQ4_NL_4_8", "IQ4_NL"), 38: ("IQ4_NL_8_8", "IQ4_NL"),
    },
    _IK: {
        36: ("I2_S", "TQ2_0"), 98: ("Q8_0_X4", "Q8_0"), 99: ("Q8_1_X4", "Q8_0"), 133: ("Q6_0", "Q6_K"),
        134: ("IQ1_BN", "TQ2_0"), 135: ("IQ2_BN", "TQ2_0"), 136: ("Q8_K64", "Q8_0"), 137: ("IQ2_K", "IQ2_XS"),
        138: ("IQ3_K", "IQ3_S"), 139: ("IQ4_K", "Q4_K"), 140: ("IQ5_K", "Q5_K"), 141: ("IQ6_K", "Q6_K"),
        142: ("IQ2_TN", "TQ2_0"), 143: ("IQ1_TN", "TQ2_0"), 144: ("IQ4_KS", "IQ4_XS"), 145: ("IQ2_KS", "IQ2_XS"),
        146: ("IQ4_KSS", "IQ4_XS"), 147: ("Q8_K16", "Q8_0"), 148: ("Q8_K32", "Q8_0"), 149: ("Q8_KR8", "Q8_0"),
        150: ("Q8_K128", "Q8_0"), 151: ("Q8_KV", "Q8_0"), 152: ("IQ5_KS", "Q5_K"), 153: ("IQ2_KT", "IQ2_XXS"),
        154: ("IQ3_KT", "IQ3_XXS"), 155: ("IQ4_KT", "IQ4_XS"), 156: ("IQ3_KS", "IQ3_XXS"), 157: ("IQ2_KL", "Q2_K"),
        158: ("IQ1_KT", "IQ1_M"),
    },
    _IK_ROWS: {
        202: ("Q4_0_R8", "Q4_0"), 206: ("Q5_0_R4", "Q5_0"), 208: ("Q8_0_R8", "Q8_0"), 210: ("Q2_K_R4", "Q2_K"),
        211: ("Q3_K_R4", "Q3_K"), 212: ("Q4_K_R4", "Q4_K"), 213: ("Q5_K_R4", "Q5_K"), 214: ("Q6_K_R4", "Q6_K"),
        216: ("IQ2_XXS_R4", "IQ2_XXS"), 217: ("IQ2_XS_R4", "IQ2_XS"), 218: ("IQ3_XXS_R4", "IQ3_XXS"),
        219: ("IQ1_S_R4", "IQ1_S"), 220: ("IQ4_NL_R4", "IQ4_NL"), 221: ("IQ3_S_R4", "IQ3_S"),
        222: ("IQ2_S_R4", "IQ2_S"), 223: ("IQ4_XS_R8", "IQ4_XS"), 229: ("IQ1_M_R4", "IQ1_M"),
        230: ("BF16_R16", "BF16"), 233: ("Q6_0_R4", "Q6_K"), 335: ("IQ2_BN_R4", "TQ2_0"),
        337: ("IQ2_K_R4", "IQ2_XS"), 338: ("IQ3_K_R4", "IQ3_S"), 339: ("IQ4_K_R4", "Q4_K"),
        340: ("IQ5_K_R4", "Q5_K"), 344: ("IQ4_KS_R4", "IQ4_XS"), 352: ("IQ5_KS_R4", "Q5_K"),
        397: ("Q8_K_R16", "Q8_0"), 398: ("Q8_KV_R8", "Q8_0"), 399: ("Q8_K_R8", "Q8_0"),
    },
}
# fmt: on

OTHER_TYPES: Mapping[int, OtherType] = MappingProxyType(
    {
        number: OtherType(name, owner, instead)
        for owner, types in _NAMES.items()
        for number, (name, instead) in types.items()
    }
)


def unsupported_type(number: int, supported: str) -> str:
    """Returns the message for a tensor of a type that is not read. supported: the names of the types that are."""
    other = OTHER_TYPES.get(number)
    these = f"supported are {supported}"
    if other is None:
        return f"is of type number {number}, which is not supported; {these}; choose one of them, or a newer moeserve"
    said = f"is of type {other.name} ({other.owner}, number {number}), which is not supported; "
    if other.instead:
        return f"{said}download a file of {other.instead} instead; {these}"
    return f"{said}{these}; convert the model to one of them"
