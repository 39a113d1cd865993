"""Which struct an fmha_v2 kernel reads: told by its size and by the kernel's own machine code.

Generations of TensorRT-LLM have structs of one size and different fields, and names do not tell
them apart. What a kernel reads of its parameters shows in the operands of its instructions.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from dataclasses import dataclass
from typing import Any

from ...cubin import image_kind, read_cubin
from ...errors import LaunchConfigError, ParamsError
from ...kernel import KernelFunction
from . import _params
from ._names import KernelName
from ._options import NO_WINDOW

_INSTRUCTION_BYTES = 16
_BARRIER, _LOAD_UNIFORM = 0xB1D, 0x7AC  # opcodes: no operand there; one a bit lower


@dataclass(frozen=True)
class Layout:
    """A struct, whose kernels read it, and why those are not run ('' where they are)."""

    struct: type[ctypes.Structure]
    whose: str
    refused: str = ""


LAYOUTS = (
    Layout(_params.Params, "TensorRT-LLM from August 2025 on"),
    Layout(_params.ParamsWithoutSinks, "TensorRT-LLM of July 2025"),
    Layout(_params.EdgeParams, "TensorRT-Edge-LLM", "its kernels are not run here"),
    Layout(_params.Params640, "TensorRT-LLM of the second quarter of 2025"),
    Layout(_params.LongParams512, "TensorRT-LLM 0.16, head sizes 192 and 128"),
    Layout(_params.Params576, "TensorRT-LLM of early 2025"),
    Layout(_params.Params512, "TensorRT-LLM 0.12 to 0.16"),
)
# Of every kernel, whatever it computes; 3,100 kernels of four generations do.
_ALWAYS_READ = ("out", "out_stride", "num_heads", "max_seqlen_q", "cu_seqlens_q", "is_padded")
_MASK_READ = ("packed_mask", "packed_mask_stride", "cu_mask_rows")

# Options by the field that says them, and its value without them.
_OPTIONS = {
    "attention_sinks": ("attention_sinks", 0),
    "softmax_stats": ("softmax_stats", 0),
    "window_size": ("sliding_window_size", NO_WINDOW),
    "chunk_size": ("log2_chunk_size", 0),
    "alibi": ("alibi", 0),
}


@dataclass(frozen=True)
class Reader:
    """What a kernel reads: a struct, and of that the bytes at these offsets."""

    layout: Layout
    reads: frozenset[int]


_found: weakref.WeakKeyDictionary[KernelFunction, dict[int, Reader]] = weakref.WeakKeyDictionary()


def reader_of(function: KernelFunction, name: KernelName, device: int) -> Reader:
    """What `function` reads on `device`: a struct that is run here. Raises ParamsError."""
    known = _found.setdefault(function, {})
    if device not in known:
        known[device] = _find(function, name, device)
    return known[device]


def _find(function: KernelFunction, name: KernelName, device: int) -> Reader:
    sizes = [param.size_bytes for param in function.params or ()]
    fitting = [one for one in LAYOUTS if sizes == [ctypes.sizeof(one.struct)]]
    if not fitting:
        known = ", ".join(map(str, sorted({ctypes.sizeof(one.struct) for one in LAYOUTS})))
        raise ParamsError(
            f"{name} takes parameters of {sizes} bytes, not one struct of {known}: it was built by "
            "another version of TensorRT-LLM"
        )
    image = function._kernel.image(device)
    if image_kind(image) != "cubin":
        raise ParamsError(
            f"{name}: {len(fitting)} structs of {sizes[0]} bytes are known, and only machine code "
            f"tells which one a kernel reads; its image for this GPU is {image_kind(image)}"
        )
    reads = struct_reads(image, function.spec.symbol or function.name, sizes[0])
    fitting = [one for one in fitting if _fits(one.struct, name, reads)]
    if len(fitting) != 1:
        among = " or ".join(one.whose for one in fitting) or "no version known here"
        raise ParamsError(
            f"{name} reads its struct of {sizes[0]} bytes as {among} would have it (bytes "
            f"{', '.join(map(str, sorted(reads)))}): its arguments cannot be laid out"
        )
    if fitting[0].refused:
        raise LaunchConfigError(f"{name} is of {fitting[0].whose}: {fitting[0].refused}")
    return Reader(fitting[0], reads)


def struct_reads(image: bytes, symbol: str, size_bytes: int) -> frozenset[int]:
    """The bytes of its one parameter, a struct of that size, at which a kernel's code reads."""
    sections = {section.name: section for section in read_cubin(image).sections}
    text, bank = sections[f".text.{symbol}"], sections[f".nv.constant0.{symbol}"]
    start = bank.size_bytes - size_bytes  # parameters end constant bank 0
    code = image[text.offset : text.offset + text.size_bytes]
    found = set()
    for at in range(0, len(code), _INSTRUCTION_BYTES):
        word = int.from_bytes(code[at : at + 8], "little")
        opcode = word & 0xFFF
        # An operand in a constant bank: its form, its bank, the byte in it.
        if opcode == _BARRIER or word >> 9 & 7 not in (3, 5) or word >> 54 & 0x1F:
            continue
        offset = word >> (37 if opcode == _LOAD_UNIFORM else 38) & 0xFFFF
        if offset >= start:
            found.add(offset - start)
    return frozenset(found)


def _fits(struct: type[ctypes.Structure], name: KernelName, reads: frozenset[int]) -> bool:
    """Whether all that is read is a field's, and what such a kernel must read is read."""

    def is_read(field: str) -> bool:
        return getattr(struct, field).offset in reads

    needed = [*_ALWAYS_READ, *(["softcap"] if "softcapping" in name.attributes else [])]
    if name.variant != "tma_ws":  # those find Q by its tensor map
        is_packed = name.layout == "qkv" and hasattr(struct, "qkv_stride")
        needed.append("qkv_stride" if is_packed else "q_stride")
    has_mask = name.mask == "custom_mask"
    return (
        reads <= _words(struct)
        and all(map(is_read, needed))
        and all(is_read(field) == has_mask for field in _MASK_READ)
    )


@functools.cache
def _words(struct: type[ctypes.Structure]) -> frozenset[int]:
    """Where the fields of a struct, and the second halves of those of 8 bytes, begin."""
    words: set[int] = set()
    for field, kind, *_ in struct._fields_:
        start, size = getattr(struct, field).offset, ctypes.sizeof(kind)
        if issubclass(kind, ctypes.Structure):
            words |= {start + word for word in _words(kind)}
        elif not field.startswith("_"):
            words |= set(range(start, start + size, 4))
    return frozenset(words)


def laid_out(params: Any, name: KernelName, reader: Reader) -> Any:
    """`params`, filled as a `Params`, as the struct that the kernel reads.

    Raises LaunchConfigError for an argument that the struct has no field for, or that the kernel
    does not read.
    """
    layout = reader.layout
    made = params if isinstance(params, layout.struct) else _moved(params, name, layout)
    for option, (field, without) in _OPTIONS.items():
        is_given = not _is_idle(getattr(params, field), without)
        if is_given and getattr(layout.struct, field).offset not in reader.reads:
            raise LaunchConfigError(f"{option}: {name} is a kernel that does not read it")
    return made


def _moved(params: Any, name: KernelName, layout: Layout) -> Any:
    """`params` in another struct."""
    struct = layout.struct
    fields = {field: getattr(params, field) for field, _ in params._fields_ if field[0] != "_"}
    if not hasattr(struct, "k_stride"):
        if name.variant == "tma_ws" or name.layout not in ("qkv", "q_paged_kv"):
            raise LaunchConfigError(
                f"{name} is of {layout.whose}, whose tma_ws kernels and q_kv layout are not known "
                "here: take one with layout qkv or q_paged_kv that ends in _nl or _nl_tiled"
            )
        fields["qkv_stride"], fields["kv_stride"] = fields["q_stride"], fields.pop("k_stride")
    # What says nothing in a struct that cannot say it.
    idle = {"num_grouped_heads": 1, "softmax_stats_stride": fields["softmax_stats_stride"]}
    made = struct()
    for field, value in fields.items():
        if hasattr(struct, field):
            setattr(made, field, value)
        elif not _is_idle(value, idle.get(field, 0)):
            raise LaunchConfigError(
                f"{field}: {name} is of {layout.whose}, which has no such parameter"
            )
    return made


def _is_idle(value: Any, idle: int) -> bool:
    if isinstance(value, (ctypes.Structure, ctypes.Array)):
        return not any(bytes(value))
    return bool(value == idle)
