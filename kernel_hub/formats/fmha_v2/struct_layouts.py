"""Which struct an fmha_v2 kernel reads: told by its size and by the kernel's own machine code.

Generations of TensorRT-LLM have structs of one size and different fields, and names do not tell
them apart. What a kernel reads of its parameters shows in the operands of its instructions: it is
the struct in whose terms that makes sense for a kernel of such a name.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

from ...cubin import image_kind
from ...errors import LaunchConfigError, ParamsError
from ...kernel import KernelFunction
from . import param_struct
from .names import SLIDING, KernelName
from .options import NO_WINDOW
from .reads import Read, all_fields, fields_read, may_assert, struct_reads

# A kernel may read one field more, or one fewer, than all those known of such a name.
_MOST_ODD = 1


@dataclass(frozen=True)
class StructLayout:
    """A struct, whose kernels read it, and why those are not run ('' where they are)."""

    struct: type[ctypes.Structure]
    whose: str
    refused: str = ""


LAYOUTS = (
    StructLayout(param_struct.Params, "TensorRT-LLM from August 2025 on"),
    StructLayout(param_struct.ParamsWithoutSinks, "TensorRT-LLM of July 2025"),
    StructLayout(param_struct.EdgeParams, "TensorRT-Edge-LLM", "its kernels are not run here"),
    StructLayout(param_struct.Params640, "TensorRT-LLM of the second quarter of 2025"),
    StructLayout(param_struct.LongParams512, "TensorRT-LLM 0.16, head sizes 192 and 128"),
    StructLayout(param_struct.Params576, "TensorRT-LLM of early 2025"),
    StructLayout(param_struct.Params512, "TensorRT-LLM 0.12 to 0.16"),
)
# Options by the field that says them, and its value without them.
_OPTIONS = {
    "attention_sinks": ("attention_sinks", 0),
    "softmax_stats": ("softmax_stats", 0),
    "window_size": ("sliding_window_size", NO_WINDOW),
    "chunk_size": ("log2_chunk_size", 0),
    "alibi": ("alibi", 0),
}
_FIRST_OF = {"alibi": "alibi.num_heads_pow2"}


@dataclass(frozen=True)
class StructReader:
    """What a kernel reads: a struct, and of that these fields; whether it may assert."""

    layout: StructLayout
    fields: frozenset[str]
    may_assert: bool


_found: weakref.WeakKeyDictionary[KernelFunction, dict[int, StructReader]] = (
    weakref.WeakKeyDictionary()
)


def reader_of(function: KernelFunction, name: KernelName, device: int) -> StructReader:
    """What `function` reads on `device`: a struct that is run here. Raises ParamsError."""
    known = _found.setdefault(function, {})
    if device not in known:
        known[device] = _find(function, name, device)
    return known[device]


def _find(function: KernelFunction, name: KernelName, device: int) -> StructReader:
    sizes = [param.size_bytes for param in function.params or ()]
    fitting = [one for one in LAYOUTS if sizes == [ctypes.sizeof(one.struct)]]
    if not fitting:
        known = ", ".join(map(str, sorted({ctypes.sizeof(one.struct) for one in LAYOUTS})))
        raise ParamsError(
            f"{name} takes parameters of {sizes} bytes, not one struct of {known}: it was built by "
            "another version of TensorRT-LLM"
        )
    image = function._loader.image(device)
    if image_kind(image) != "cubin":
        raise ParamsError(
            f"{name}: {len(fitting)} structs of {sizes[0]} bytes are known, and only machine code "
            f"tells which one a kernel reads; its image for this GPU is {image_kind(image)}"
        )
    reads = struct_reads(image, function.spec.symbol or function.name, sizes[0])
    layout, fields = _tell(fitting, name, reads, sizes[0])
    if layout.refused:
        raise LaunchConfigError(f"{name} is of {layout.whose}: {layout.refused}")
    return StructReader(layout, fields, may_assert(image))


def _tell(
    layouts: list[StructLayout], name: KernelName, reads: frozenset[Read], size_bytes: int
) -> tuple[StructLayout, frozenset[str]]:
    """The layout in whose terms these reads are least odd, and the fields they are of."""
    told = []
    for layout in layouts:
        fields = fields_read(layout.struct, reads)
        if fields is not None and _essential(name) <= fields:
            told.append((_oddities(layout.struct, name, fields), layout, fields))
    told.sort(key=lambda one: len(one[0]))
    least = [one for one in told if len(one[0]) == len(told[0][0])]
    if len(least) != 1 or len(least[0][0]) > _MOST_ODD:
        among = " or ".join(layout.whose for odd, layout, _ in least if len(odd) <= _MOST_ODD)
        raise ParamsError(
            f"{name} reads its struct of {size_bytes} bytes as {among or 'no version known here'} "
            f"would have it (bytes {', '.join(map(str, sorted({read.offset for read in reads})))}"
            + "".join(f"; to {layout.whose} {', '.join(odd)}" for odd, layout, _ in least if odd)
            + "): its arguments cannot be laid out"
        )
    return least[0][1:]


def _essential(name: KernelName) -> set[str]:
    """What no attention can do without; tma_ws kernels find Q by its tensor map."""
    q = set() if name.variant == "tma_ws" else {"qkv" if name.layout == "qkv" else "q"}
    return {"out", "cu_seqlens_q"} | q


def _oddities(
    struct: type[ctypes.Structure], name: KernelName, fields: frozenset[str]
) -> list[str]:
    """Where reading these fields is not what kernels of such names do: 3,100 kernels of 3,100.

    Those are TensorRT-LLM's of 0.16 and of September 2025, and TensorRT-Edge-LLM's.
    """
    tma, packed = name.variant == "tma_ws", name.layout == "qkv"
    paged = name.layout == "q_paged_kv"
    q_stride = "qkv_stride" if packed and hasattr(struct, "qkv_stride") else "q_stride"
    sage = any(one.startswith("sage_") for one in name.attributes)
    always = {  # read by all of them, by no other
        "num_heads max_seqlen_q is_padded out_stride": True,
        q_stride: not tma,
        "packed_mask packed_mask_stride cu_mask_rows": name.mask == "custom_mask",
        "softcap": "softcapping" in name.attributes,
        "softmax_stats softmax_stats_stride": not tma or "softmax" in name.attributes,
        "tile_counter num_tiles num_tiles_per_head": tma,
        "paged.max_blocks_per_seq paged.tokens_per_block_log2 paged.block_offsets": paged,
    }
    some = {  # read by some of them, by no other
        "qkv": packed,
        "q": not packed,
        "kv": name.layout == "q_kv",
        "k v": name.layout == "q_k_v",
        "k_stride v_stride kv_stride": not packed and not tma,
        "attention_sinks": tma or struct is param_struct.EdgeParams,
        "balanced": tma,
        "blocks_per_tma_load blocks_per_tma_load_log2": paged and tma,
        "paged.pool paged.bytes_per_block": paged,
        "sliding_window_size log2_chunk_size": name.mask in SLIDING,
        "sage_q.scales sage_k.scales sage_v.scales": sage,
    }
    known = {field.name for field in all_fields(struct)}
    must = {one for names, of in always.items() if of for one in names.split()} & known
    may_not = {one for names, of in (always | some).items() if not of for one in names.split()}
    return [
        *(f"it should read {field}" for field in sorted(must - fields)),
        *(f"it has no use for {field}" for field in sorted(may_not & fields)),
    ]


def laid_out(params: Any, name: KernelName, reader: StructReader) -> Any:
    """`params`, filled as a `Params`, as the struct that the kernel reads.

    Raises LaunchConfigError for an argument that the struct has no field for, or that the kernel
    does not read.
    """
    layout = reader.layout
    _check_kv_heads(params, name, reader)
    made = params if isinstance(params, layout.struct) else _moved(params, name, layout)
    for option, (field, without) in _OPTIONS.items():
        is_given = not _is_idle(getattr(params, field), without)
        if is_given and _FIRST_OF.get(field, field) not in reader.fields:
            raise LaunchConfigError(f"{option}: {name} is a kernel that does not read it")
    return made


def _check_kv_heads(params: Any, name: KernelName, reader: StructReader) -> None:
    """Refuse what the kernel answers with an assertion, which ends the context of the process.

    Kernels of two head sizes did not know, at first, where V is in packed rows with fewer heads of
    K and V than of Q: those of 0.16 assert that there are none such.
    """
    is_old = not hasattr(reader.layout.struct, "k_stride")
    if (
        name.layout == "qkv"
        and name.head_dim != name.head_dim_v
        and name.variant != "tma_ws"
        and params.num_kv_heads != params.num_heads
        and (is_old or reader.may_assert)
    ):
        raise LaunchConfigError(
            f"num_kv_heads={params.num_kv_heads}: {name} is of {reader.layout.whose}, whose "
            "kernels with two head sizes take as many heads of K and V as of Q, "
            f"{params.num_heads}, and stop themselves at fewer: repeat those of K and V"
        )


def _moved(params: Any, name: KernelName, layout: StructLayout) -> Any:
    """`params` in another struct."""
    struct = layout.struct
    fields = {field: getattr(params, field) for field, _ in params._fields_ if field[0] != "_"}
    if not hasattr(struct, "k_stride"):
        if name.variant == "tma_ws" or name.layout not in ("qkv", "q_paged_kv"):
            raise LaunchConfigError(
                f"{name} is of {layout.whose}, whose tma_ws kernels and q_kv layout are not known "
                "here: take one with layout qkv or q_paged_kv that ends in _nl or _nl_tiled"
            )
        if name.layout == "q_paged_kv" and params.sliding_window_size != NO_WINDOW:
            raise LaunchConfigError(
                f"window_size: {name} is of {layout.whose}, whose kernels take the blocks as a "
                "ring of the window's size, not as all keys in a row: take one of TensorRT-LLM "
                "from July 2025 on"
            )
        fields["sliding_window_size"] = _window_of_old(fields["sliding_window_size"], name, layout)
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


def _window_of_old(size: int, name: KernelName, layout: StructLayout) -> int:
    """How many keys these kernels are told to see: those of 0.16 see one more than that."""
    if size == NO_WINDOW:
        return size
    if layout.struct not in (param_struct.LongParams512, param_struct.Params512):
        raise LaunchConfigError(
            f"window_size: {name} is of {layout.whose}, of which it is not known whether a window "
            "holds a row's own key: take one of TensorRT-LLM from July 2025 on"
        )
    return size - 1


def _is_idle(value: Any, idle: int) -> bool:
    if isinstance(value, (ctypes.Structure, ctypes.Array)):
        return not any(bytes(value))
    return bool(value == idle)
