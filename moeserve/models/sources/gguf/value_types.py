"""The types of metadata values, by the GGUF specification's numbers.

gguf-py has them too, but importing it also imports its reader, its writer and YAML, in every process that reads a
header.
"""

from __future__ import annotations

from enum import IntEnum


class ValueType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12
