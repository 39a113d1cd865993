"""The declared run-time arguments of a Triton kernel: names, types, divisibility it relies on.

Read by `ttir`, from the `.ptx` or a manifest, or given by the caller; knows nothing of launches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...cubin import read_ptx
from ...errors import CubinCorruptError, ParamsError
from .configuration import entry, is_tuple, leaves, split, tuple_text
from .metadata import Descriptor, Metadata

HIDDEN = ("global_scratch", "profile_scratch")
# Element types: Triton's name -> C's.
SCALARS = {
    "i1": "bool", "i8": "int8_t", "i16": "int16_t", "i32": "int", "i64": "int64_t",
    "u1": "bool", "u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t",
    "fp16": "__half", "bf16": "__nv_bfloat16", "fp32": "float", "f32": "float", "fp64": "double",
}  # fmt: skip
_POINTEES = {**SCALARS, "fp8e4nv": "__nv_fp8_e4m3", "fp8e5": "__nv_fp8_e5m2"}
_PTX = {".u32": "i32", ".f32": "fp32", ".f64": "fp64"}
# PTX's number of a TMA element type; bytes and halfwords may be of several.
_TMA_ELEMENTS = {
    2: "u32",
    3: "i32",
    4: "u64",
    5: "i64",
    6: "fp16",
    7: "fp32",
    9: "fp64",
    10: "bf16",
}
TENSOR_MAP_BYTES = 128
UNKNOWN = "struct unknown"  # a size without a type

_DECLARED_DESC = re.compile(r"tensordesc<(\w+)\[([\d,\s]*)\][\w\s,<>=.]*>")
MAX_ARGUMENTS = 1024
MAX_DIVISOR = 1 << 20


@dataclass(frozen=True)
class Argument:
    """One declared run-time argument.

    type: in Triton's spelling: 'i32', 'fp16', '*fp16', 'tensordesc<fp16[64,64]>'; None where only
    the size is known. divisors: what each of its cubin parameters is compiled to be divisible by
    (a pointer: aligned to, bytes), 1 where nothing is assumed; a plain argument has one.
    """

    name: str
    type: str | None
    divisors: tuple[int, ...] = (1,)
    parts: tuple[str, ...] = ()  # a descriptor's parameters in Triton's spelling

    @property
    def is_descriptor(self) -> bool:
        """Whether the caller passes a host tensor descriptor."""
        return bool(self.parts)

    @property
    def block(self) -> tuple[int, ...]:
        """A descriptor's tile, where the type says it."""
        match = _DECLARED_DESC.fullmatch(self.type or "")
        return tuple(int(part) for part in match[2].split(",")) if match and match[2] else ()

    @property
    def element(self) -> str:
        """What a pointer or descriptor points to, in Triton's spelling; '' where not known."""
        if self.is_descriptor:
            match = _DECLARED_DESC.fullmatch(self.type or "")
            return match[1] if match else ""
        return (self.type or "")[1:] if (self.type or "").startswith("*") else ""


def c_type(kind: str | None) -> str:
    """The C type of a cubin parameter in Triton's spelling."""
    if kind is None:
        return UNKNOWN
    if kind == "nvTmaDesc":
        return "CUtensorMap"
    if kind.startswith("*"):
        return (
            _POINTEES.get(kind[1:].removeprefix("k"), "void") + "*"
        )  # *k: what it points to is const
    return SCALARS.get(kind, UNKNOWN)


def c_types(arguments: Sequence[Argument], metadata: Metadata) -> list[tuple[str, str]]:
    """(C type, name) of each parameter of the cubin, Triton's hidden pointers included."""
    found: list[tuple[str, str]] = []
    for argument in arguments:
        names = part_names(argument)
        kinds = argument.parts or (argument.type,)
        found += [(c_type(kind), name) for kind, name in zip(kinds, names, strict=True)]
    taken = {name for _, name in found}
    for name in HIDDEN[: metadata.num_hidden]:
        found.append(("void*", f"{name} (hidden)" if name in taken else name))
    return found


def part_names(argument: Argument) -> list[str]:
    """Names of the cubin parameters an argument becomes."""
    if not argument.is_descriptor:
        return [argument.name]
    rank = descriptor_rank(argument.parts)
    lengths = [f"{argument.name}.shape[{i}]" for i in range(rank)]
    strides = [f"{argument.name}.strides[{i}]" for i in range(rank)]
    flags = [f"{argument.name}.padding", f"{argument.name}.round_f32_to_tf32"]
    if argument.parts[0] == "nvTmaDesc":
        return [argument.name, *lengths, *strides]
    again = [f"{name} (again)" for name in (*lengths, *strides)]
    num_flags = argument.parts.count("i1")
    return [argument.name, *lengths, *strides, *flags[:num_flags], *again]


def descriptor_parts(first: str, rank: int, num_flags: int) -> tuple[str, ...]:
    """What a descriptor becomes: a TMA descriptor, or a pointer with everything said twice."""
    tail = ("i32",) * rank + ("i64",) * rank
    if first == "nvTmaDesc":
        return (first, *tail)
    return (first, *("i64",) * (2 * rank), *("i1",) * num_flags, *tail)


def descriptor_rank(parts: Sequence[str]) -> int:
    """The rank of a descriptor with these parts."""
    return sum(part == "i32" for part in parts)


def read_ptx_arguments(
    text: str | bytes, function: str, metadata: Metadata, label: str
) -> tuple[Argument, ...]:
    """What PTX knows: pointers (from Triton 3.2 on), widths, floats. No names, no divisibility."""
    try:
        params = read_ptx(text).functions.get(function)
    except CubinCorruptError as error:
        raise CubinCorruptError(f"{label}: {error.args[0]}") from error
    if params is None:
        raise CubinCorruptError(f"{label} has no function {function!r}")
    declared = params[: max(0, len(params) - metadata.num_hidden)]
    return of_sizes([(_PTX.get(param.type), param.size_bytes) for param in declared], metadata)


def of_sizes(flat: Sequence[tuple[str | None, int]], metadata: Metadata) -> tuple[Argument, ...]:
    """Arguments of the cubin's (type or None, bytes) each, the hidden ones left out.

    `tensordesc_meta` tells which of them are the parts of a host tensor descriptor.
    """
    maps, found, at = iter(metadata.maps), list[Argument](), 0
    while at < len(flat):
        kind, size_bytes = flat[at]
        meta = next(maps, None) if size_bytes == TENSOR_MAP_BYTES else None
        rank = len(meta.block) if meta else 0
        parts = descriptor_parts("nvTmaDesc", rank, 0) if meta else ()
        sizes = [TENSOR_MAP_BYTES, *(4,) * rank, *(8,) * rank]
        name = f"arg{len(found)}"
        if meta and [size for _, size in flat[at : at + len(parts)]] == sizes:
            # The tile may be narrower than the block that the kernel was written for.
            kind = f"tensordesc<{_TMA_ELEMENTS.get(meta.elem_type, 'void')}[]>"
            found.append(Argument(name, kind, (1,) * len(parts), parts))
            at += len(parts)
        else:
            found.append(Argument(name, kind))
            at += 1
    return tuple(found)


def with_signature(
    arguments: Sequence[Argument] | None, signature: Any, metadata: Metadata
) -> tuple[Argument, ...]:
    """Arguments as the caller's own `signature` says, which is spelled as for compiling.

    `arguments`: what was read from the files; its divisibility holds too. Constants are left out.
    Raises ParamsError.
    """
    declared = _declared(arguments, signature)
    divisors = [item for argument in arguments or () for item in argument.divisors]
    found, at = [], 0
    metas = iter(metadata.descriptors)
    for name, text in declared.items():
        kind, _, hint = text.partition(":")
        parts = _declared_parts(name, kind, metas, metadata)
        size = max(1, len(parts))
        assumed = divisors[at : at + size] if arguments is not None else [1] * size
        least = int(hint or 1)
        found.append(Argument(name, kind, tuple(max(least, one) for one in assumed), parts))
        at += size
    if arguments is not None and at != len(divisors):
        raise ParamsError(
            f"signature declares {len(declared)} arguments ({at} parameters); {metadata.name} was "
            f"compiled with {len(divisors)}: {', '.join(a.name for a in arguments)} (constexprs "
            "and arguments equal to 1 are folded away: leave them out or say 'constexpr')"
        )
    return tuple(found)


def _declared(arguments: Sequence[Argument] | None, signature: Any) -> dict[str, str]:
    """{name: type with its hint} of the arguments that `signature` leaves to the launch."""
    found: Iterable[tuple[Any, Any]]
    if isinstance(signature, str):
        found = enumerate(split(signature))
    elif isinstance(signature, Mapping):
        found = signature.items()
    else:
        raise ParamsError(
            f"signature is a {type(signature).__name__}; expected a text such as '*fp16:16,i32' or "
            "a dict name -> type"
        )
    kinds: dict[str, str] = {}
    for name, text in found:
        if is_tuple(text):
            text = tuple_text(f"signature[{name!r}]", text)
            kinds |= {leaf: kind for _, leaf, kind, _ in leaves(str(name), text)}
        elif text is not None:
            kinds[str(name)] = entry(f"signature[{name!r}]", text)[0]
    kinds = {name: kind for name, kind in kinds.items() if kind not in ("", "constexpr")}
    if not isinstance(signature, str):
        return kinds
    names = [argument.name for argument in arguments or ()]
    if len(names) != len(kinds):  # the caller says what is wrong
        names = [f"arg{i}" for i in range(len(kinds))]
    return dict(zip(names, kinds.values(), strict=True))


def _declared_parts(
    name: str, kind: str, metas: Iterator[Descriptor | None], metadata: Metadata
) -> tuple[str, ...]:
    if match := _DECLARED_DESC.fullmatch(kind):
        rank = match[2].count(",") + 1
        if next(metas, None) is not None:
            return descriptor_parts("nvTmaDesc", rank, 0)
        version = [int(part) for part in re.findall(r"\d+", metadata.triton_version or "")[:2]]
        num_flags = 2 if version >= [3, 7] else 1 if version >= [3, 5] else 0
        return descriptor_parts("*" + match[1], rank, num_flags)
    if not kind.startswith("*") and kind not in SCALARS:
        raise ParamsError(
            f"signature[{name!r}] is {kind!r}, which no launch can pass; it takes pointers, "
            f"'tensordesc<fp16[64,64]>' and {', '.join(SCALARS)}"
        )
    return ()


def is_divisor(value: object) -> bool:
    """Whether an argument can be taken to be divisible by `value`."""
    return type(value) is int and 1 <= value <= MAX_DIVISOR and not value & (value - 1)


def arguments_from_json(found: Any, label: str) -> tuple[Argument, ...]:
    """Arguments as `dataclasses.asdict` of each wrote them; `label` names the file in messages.

    Raises CubinCorruptError.
    """
    if not isinstance(found, list) or len(found) > MAX_ARGUMENTS:
        raise CubinCorruptError(f"{label}: arguments is a {type(found).__name__}; expected a list")
    return tuple(_argument(item, f"{label}: arguments[{i}]") for i, item in enumerate(found))


def _argument(item: Any, where: str) -> Argument:
    if not isinstance(item, Mapping):
        raise CubinCorruptError(f"{where} is a {type(item).__name__}; expected an object")
    name, kind = item.get("name"), item.get("type")
    divisors, parts = item.get("divisors", [1]), item.get("parts", [])
    if not isinstance(name, str) or not name:
        raise CubinCorruptError(f"{where}: name is {name!r}; expected a string")
    if kind is not None and not isinstance(kind, str):
        raise CubinCorruptError(f"{where}: type is {kind!r}; expected a string or null")
    if not isinstance(parts, (list, tuple)) or not all(isinstance(p, str) for p in parts):
        raise CubinCorruptError(f"{where}: parts is {parts!r}; expected a list of strings")
    if parts:
        rank = descriptor_rank(parts)
        if tuple(parts) != descriptor_parts(parts[0], rank, list(parts).count("i1")):
            raise CubinCorruptError(f"{where}: parts is {parts!r:.80}; not those of a descriptor")
    if (
        not isinstance(divisors, (list, tuple))
        or len(divisors) != max(1, len(parts))
        or not all(map(is_divisor, divisors))
    ):
        raise CubinCorruptError(
            f"{where}: divisors is {divisors!r:.80}; expected {max(1, len(parts))} powers of two"
        )
    return Argument(name, kind, tuple(divisors), tuple(parts))
