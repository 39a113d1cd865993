"""C types as the builder writes them and the packers read them: size, struct code, dtype token.

Knows names only: no ctypes, no NumPy, no torch. One spelling a type (see `canonical`).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple


class TypeInfo(NamedTuple):
    """One C type as a kernel parameter.

    size_bytes: bytes in the parameter buffer (alignment is the same for all but CUtensorMap).
    struct_code: code for `struct.pack`, None where the value has no such code (bf16, fp8, structs).
    kind: 'int' | 'uint' | 'float' | 'bool' | 'pointer' | 'struct'.
    dtype: dtype token of the scalar, or of what the pointer points to; None = unknown, unchecked.
    """

    size_bytes: int
    struct_code: str | None
    kind: str
    dtype: str | None


SCALARS: dict[str, TypeInfo] = {
    "bool": TypeInfo(1, "?", "bool", "bool"),
    "char": TypeInfo(1, "b", "int", "int8"),
    "int8_t": TypeInfo(1, "b", "int", "int8"),
    "uint8_t": TypeInfo(1, "B", "uint", "uint8"),
    "int16_t": TypeInfo(2, "h", "int", "int16"),
    "uint16_t": TypeInfo(2, "H", "uint", "uint16"),
    "int": TypeInfo(4, "i", "int", "int32"),
    "uint32_t": TypeInfo(4, "I", "uint", "uint32"),
    "int64_t": TypeInfo(8, "q", "int", "int64"),
    "uint64_t": TypeInfo(8, "Q", "uint", "uint64"),
    "float": TypeInfo(4, "f", "float", "fp32"),
    "double": TypeInfo(8, "d", "float", "fp64"),
    "__half": TypeInfo(2, "e", "float", "fp16"),
    "__nv_bfloat16": TypeInfo(2, None, "float", "bf16"),
    "__nv_fp8_e4m3": TypeInfo(1, None, "float", "e4m3"),
    "__nv_fp8_e5m2": TypeInfo(1, None, "float", "e5m2"),
    "CUtensorMap": TypeInfo(128, None, "struct", None),
}

# Other spellings of the names above. `long` is 64 bits: nvcc's hosts for these cubins are LP64.
ALIASES = {
    "signed char": "int8_t",
    "unsigned char": "uint8_t",
    "short": "int16_t",
    "unsigned short": "uint16_t",
    "int32_t": "int",
    "unsigned": "uint32_t",
    "long": "int64_t",
    "long long": "int64_t",
    "unsigned long": "uint64_t",
    "unsigned long long": "uint64_t",
    "ptrdiff_t": "int64_t",
    "intptr_t": "int64_t",
    "size_t": "uint64_t",
    "uintptr_t": "uint64_t",
    "half": "__half",
    "nv_bfloat16": "__nv_bfloat16",
}
_DROPPED = {"const", "volatile", "restrict", "__restrict__", "__restrict"} | {
    *("struct", "class", "enum", "union", "typename", "register"),
}
_INTEGER_WORDS = {"unsigned", "signed", "short", "long", "int", "char"}
_TOKEN = re.compile(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*|\S")


@lru_cache(maxsize=1024)
def canonical(type_text: str) -> str:
    """The one spelling of a C type: `const unsigned int *__restrict__` -> `uint32_t*`.

    Qualifiers, `struct` and `std::` go; pointers are written `T*` without spaces. Integers are
    int8_t uint8_t int16_t uint16_t int uint32_t int64_t uint64_t (and `char`); 16-bit floats are
    `__half` and `__nv_bfloat16`. Names not in the table stay as they are.
    """
    words: list[str] = []
    stars = ""
    for token in _TOKEN.findall(type_text):
        if token == "*":
            stars += "*"
        elif token not in _DROPPED and token != ":":
            words.append(token.removeprefix("std::"))
    if words and set(words) <= _INTEGER_WORDS:
        # The words of an integer type come in any order, and `int` and `signed` say nothing new.
        sign = ["unsigned"] if "unsigned" in words else []
        if "char" in words:
            base = ["signed", "char"] if "signed" in words else [*sign, "char"]
        elif "short" in words or "long" in words:
            base = sign + [word for word in words if word in ("short", "long")]
        else:
            base = sign or ["int"]
        words = base
    name = " ".join(words)
    return ALIASES.get(name, name) + stars


@lru_cache(maxsize=1024)
def type_info(type_text: str) -> TypeInfo | None:
    """What is known of a parameter type; None for a by-value type that is not in the table.

    A pointer always has an answer: its `dtype` is that of the pointee, or None where the pointee
    is `void`, another pointer, or not in the table.
    """
    name = canonical(type_text)
    if not name.endswith("*"):
        return SCALARS.get(name)
    pointee = SCALARS.get(name[:-1])
    return TypeInfo(8, "Q", "pointer", pointee.dtype if pointee else None)
