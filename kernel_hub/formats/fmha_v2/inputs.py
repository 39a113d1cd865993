"""The tensors that an fmha_v2 kernel of each layout takes, checked, as addresses and strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

from ...arrays import interop
from ...arrays.interop import ArrayView
from ...errors import TensorError
from .names import KernelName

ITEM_BYTES = {"fp16": 2, "bf16": 2, "e4m3": 1, "fp32": 4, "int32": 4, "uint32": 4}
_ALIGNMENT = 16
TAKES = {
    "qkv": "one tensor: qkv of (total, 3, num_heads, head_dim), or with num_kv_heads "
    "(total, num_heads + 2 num_kv_heads, head_dim), or with both (total, row)",
    "q_kv": "two tensors: q of (total_q, num_heads, head_dim) and kv of (total_k, 2, num_kv_heads, "
    "head_dim), or with num_kv_heads (total_k, row)",
    "q_k_v": "three tensors: q of (total_q, num_heads, head_dim), k of (total_k, num_kv_heads, "
    "head_dim), v of (total_k, num_kv_heads, head_dim_v)",
    "q_paged_kv": "two tensors: q of (total_q, num_heads, head_dim) and the pool of (num_blocks, "
    "num_kv_heads, page_size, head_dim), and block_table of (batch_size, 2, max_blocks)",
}


@dataclass(frozen=True)
class Rows:
    """One of Q, K, V or O: where its first row is, and how many bytes further the next."""

    address: int
    stride: int


@dataclass
class Inputs:
    """What the tensors of a call say. `arrays` keeps them alive."""

    name: KernelName
    device: int | None = None
    num_heads: int = 0
    num_kv_heads: int = 0
    total_q: int = 0
    total_k: int = 0
    rows: dict[str, Rows] = field(default_factory=dict)
    pool: ArrayView | None = None
    arrays: list[Any] = field(default_factory=list)

    def take(
        self, value: Any, argument: str, dtype: str, shape: Sequence[int | None], rows: bool = True
    ) -> ArrayView:
        """The device array `argument`: `shape` with None for any length, all but rows adjacent.

        rows: the first dimension may have gaps; the rest, and all of it without, may not.
        """
        try:
            view = interop.describe(value)
        except TensorError as error:
            raise TensorError(f"{self.name}: {argument}: {error}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            found = f"a {type(value).__name__} whose array interface is malformed ({error!r})"
            raise self.refuse(argument, "a CUDA tensor or array", found) from error
        if view is None:
            raise self.refuse(argument, "a CUDA tensor or array", type(value).__name__)
        said = f"{view.dtype or 'an unknown dtype'} {view.shape}"
        if view.dtype != dtype and not {dtype, view.dtype} == {"uint32", "int32"}:
            raise self.refuse(argument, f"dtype {dtype}", said)
        if len(view.shape) != len(shape) or any(
            length not in (None, found) for length, found in zip(shape, view.shape, strict=True)
        ):
            wanted = "".join("…, " if length is None else f"{length}, " for length in shape)
            raise self.refuse(argument, f"shape ({wanted[: -1 if len(shape) == 1 else -2]})", said)
        strides = view.strides or interop.contiguous_strides(view.shape)
        adjacent = interop.contiguous_strides(view.shape)
        first = 1 if rows else 0
        wrong = [
            axis
            for axis in range(first, len(shape))
            if view.shape[axis] > 1 and strides[axis] != adjacent[axis]
        ]
        if wrong:
            raise self.refuse(
                argument,
                "contiguous rows" if rows else "contiguous memory",
                f"strides {strides} for shape {view.shape}",
            )
        if view.device is not None:
            if self.device is not None and view.device != self.device:
                raise self.refuse(argument, f"device {self.device}", f"device {view.device}")
            self.device = view.device
        self.arrays.append(value)
        return view

    def rows_of(self, view: ArrayView, argument: str, dtype: str, offset: int = 0) -> Rows:
        """The rows of a taken array, from `offset` elements into each on; aligned to 16 bytes."""
        item = ITEM_BYTES[dtype]
        row = math.prod(view.shape[1:])
        stride = row if view.strides is None or view.shape[0] < 2 else view.strides[0]
        rows = Rows(view.address + offset * item, stride * item)
        if rows.address % _ALIGNMENT or rows.stride % _ALIGNMENT or stride < row:
            raise self.refuse(
                argument,
                f"rows of at least {row * item} bytes that begin at multiples of {_ALIGNMENT}",
                f"address {rows.address:#x}, row stride {rows.stride} bytes",
            )
        return rows

    def count(self, value: Any, argument: str, default: int, least: int = 1) -> int:
        """`value`, an int of at least `least` (0 or 1), or `default` for None."""
        try:
            number = default if value is None else index(value)
        except TypeError:
            number = -1
        if isinstance(value, bool) or not (value is None or least <= number < 2**31):
            wanted = "a positive int" if least else "an int of at least 0"
            raise self.refuse(argument, wanted, f"{value!r:.80}")
        return number

    def refuse(self, argument: str, expected: str, found: object) -> TensorError:
        """The error for `argument`."""
        return TensorError(f"{self.name}: {argument}: expected {expected}, found {found}")


def read_inputs(
    name: KernelName, given: Sequence[Any], num_heads: int | None, num_kv_heads: int | None
) -> Inputs:
    """Check the tensors of the kernel's layout. Raises TensorError, naming the argument."""
    inputs = Inputs(name)
    counts = {"qkv": 1, "q_kv": 2, "q_k_v": 3, "q_paged_kv": 2}
    if len(given) != counts[name.layout]:
        raise TensorError(
            f"{name}: {len(given)} tensors given; layout {name.layout} takes {TAKES[name.layout]}"
        )
    for argument, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        inputs.count(heads, argument, 0)
    if name.layout == "qkv":
        _packed(inputs, given[0], num_heads, num_kv_heads)
    else:
        q = inputs.take(given[0], "q", name.dtype, (None, None, name.head_dim))
        inputs.total_q, inputs.num_heads = q.shape[:2]
        inputs.rows["q"] = inputs.rows_of(q, "q", name.dtype)
        if name.layout == "q_kv":
            _contiguous(inputs, given[1], num_kv_heads)
        elif name.layout == "q_k_v":
            _separate(inputs, given[1], given[2])
        else:
            _paged(inputs, given[1])
    for argument, said, found in (
        ("num_heads", num_heads, inputs.num_heads),
        ("num_kv_heads", num_kv_heads, inputs.num_kv_heads),
    ):
        if said is not None and said != found:
            raise inputs.refuse(argument, f"{found}, as the tensors have", said)
    has_keys = inputs.total_k if inputs.pool is None else inputs.pool.shape[0]
    if inputs.total_q and not has_keys:
        argument = {"q_kv": "kv", "q_k_v": "k", "q_paged_kv": "pool"}[name.layout]
        raise inputs.refuse(argument, "something to attend to", "none")
    if not inputs.num_kv_heads or inputs.num_heads % inputs.num_kv_heads or not inputs.num_heads:
        raise inputs.refuse(
            "num_kv_heads", f"a divisor of num_heads={inputs.num_heads}", inputs.num_kv_heads
        )
    return inputs


def _packed(inputs: Inputs, qkv: Any, num_heads: int | None, num_kv_heads: int | None) -> None:
    name = inputs.name
    shape = tuple(getattr(qkv, "shape", ()))
    wanted: tuple[int | None, ...]
    if len(shape) == 4:
        wanted, heads, kv_heads = (None, 3, None, name.head_dim), shape[2], shape[2]
    elif len(shape) == 3 and num_kv_heads is not None:
        wanted, heads, kv_heads = (
            (None, None, name.head_dim),
            shape[1] - 2 * num_kv_heads,
            num_kv_heads,
        )
    elif len(shape) == 2 and num_heads is not None and num_kv_heads is not None:
        row = (num_heads + num_kv_heads) * name.head_dim + num_kv_heads * name.head_dim_v
        wanted, heads, kv_heads = (None, row), num_heads, num_kv_heads
    else:
        raise inputs.refuse("qkv", TAKES["qkv"], f"shape {shape}")
    if len(shape) != 2 and name.head_dim != name.head_dim_v:
        raise inputs.refuse("qkv", "(total, row), as V's heads have another size", f"shape {shape}")
    view = inputs.take(qkv, "qkv", name.dtype, wanted)
    inputs.num_heads, inputs.num_kv_heads = heads, kv_heads
    inputs.total_q = inputs.total_k = view.shape[0]
    offsets = (0, heads * name.head_dim, (heads + kv_heads) * name.head_dim)
    for part, offset in zip("qkv", offsets, strict=True):
        inputs.rows[part] = inputs.rows_of(view, "qkv", name.dtype, offset)


def _contiguous(inputs: Inputs, kv: Any, num_kv_heads: int | None) -> None:
    name = inputs.name
    shape = tuple(getattr(kv, "shape", ()))
    if len(shape) == 4 and name.head_dim == name.head_dim_v:
        kv_heads = shape[2]
        view = inputs.take(kv, "kv", name.dtype, (None, 2, None, name.head_dim))
    elif len(shape) == 2 and num_kv_heads is not None:
        kv_heads = num_kv_heads
        row = kv_heads * (name.head_dim + name.head_dim_v)
        view = inputs.take(kv, "kv", name.dtype, (None, row))
    else:
        raise inputs.refuse("kv", TAKES["q_kv"], f"shape {shape}")
    inputs.num_kv_heads, inputs.total_k = kv_heads, view.shape[0]
    inputs.rows["k"] = inputs.rows_of(view, "kv", name.dtype)
    inputs.rows["v"] = inputs.rows_of(view, "kv", name.dtype, kv_heads * name.head_dim)


def _separate(inputs: Inputs, k: Any, v: Any) -> None:
    name = inputs.name
    k_view = inputs.take(k, "k", name.dtype, (None, None, name.head_dim))
    inputs.total_k, inputs.num_kv_heads = k_view.shape[:2]
    wanted = (inputs.total_k, inputs.num_kv_heads, name.head_dim_v)
    v_view = inputs.take(v, "v", name.dtype, wanted)
    inputs.rows["k"] = inputs.rows_of(k_view, "k", name.dtype)
    inputs.rows["v"] = inputs.rows_of(v_view, "v", name.dtype)


def _paged(inputs: Inputs, pool: Any) -> None:
    """A block holds one layer's K, or V, of page_size tokens; V's rows are as long as K's."""
    name = inputs.name
    view = inputs.take(pool, "pool", name.dtype, (None, None, None, name.head_dim), rows=False)
    page_size = view.shape[2]
    if page_size < 1 or page_size & (page_size - 1):
        raise inputs.refuse("pool", "a page_size that is a power of two", page_size)
    inputs.pool, inputs.num_kv_heads = view, view.shape[1]
    page = Rows(view.address, page_size * name.head_dim * ITEM_BYTES[name.dtype])
    inputs.rows_of(view, "pool", name.dtype)
    inputs.rows["k"] = inputs.rows["v"] = page
