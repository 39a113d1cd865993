"""What launches of grouped_linear and batched_matmul share: tensor maps, the device, pointers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core import common
from ..core.counters import counters
from .grouped_plan import BLOCK_K, Choice

_MAX_MAPS = 8192
# The 128 bytes of a tensor map say all about it and own nothing: address, sizes, strides, box.
_maps: dict[tuple[Any, ...], bytes] = {}


@dataclass(frozen=True, slots=True)
class Layout:
    """Matrices with rows evenly spaced, in two groups of evenly spaced ones."""

    outer: int
    inner: int
    rows: int
    columns: int
    outer_stride: int
    inner_stride: int
    stride: int

    @property
    def is_mappable(self) -> bool:
        """Whether a tensor map can describe it: the rows do not overlap."""
        return self.rows == 1 or self.stride >= self.columns

    @property
    def spans(self) -> int:
        """All strides, or-ed: their common low bits."""
        return self.outer_stride | self.inner_stride | (self.stride if self.rows > 1 else 0)


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch but for its pointers; `function` is None where there is nothing to compute."""

    function: Any
    choice: Choice | None = None
    numbers: tuple[int, ...] = ()
    layouts: tuple[Layout, Layout, Layout] | None = None  # of out, a and b, where maps are passed
    out_has_map: bool = False
    options: Mapping[str, bool] = field(default_factory=dict)

    def run(
        self, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *more: Any, written: Any = ()
    ) -> None:
        """Launch on the current stream. more: the other pointers; written: those that are."""
        choice = self.choice
        assert choice is not None
        outs = (*((out, None) if out.dtype == a.dtype else (None, out)), *written)
        if choice.box_rows is None or self.layouts is None:
            params: tuple[Any, ...] = (*outs, a, b, *more, *self.numbers)
        else:
            a_map = tensor_map(a, self.layouts[1], choice.box_rows[1])
            b_map = tensor_map(b, self.layouts[2], choice.box_rows[2])
            out_map = a_map  # not looked at where results leave in another way
            if self.out_has_map and not out.data_ptr() % common.VEC_BYTES:
                out_map = tensor_map(out, self.layouts[0], choice.box_rows[0])
            shared = _workspace(choice, out.device)
            params = (*outs, *shared, out_map, a_map, b_map, *more, *self.numbers)
        self.function(choice.grid, choice.block, choice.shared_bytes, None, params, **self.options)


def _workspace(
    choice: Choice, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Memory for tiles of which two blocks share k: fp32 sums, counters of blocks that arrived."""
    if not choice.num_partials:
        return None, None
    partials = torch.empty(choice.num_partials, dtype=torch.float32, device=device)
    return partials, counters(device, choice.num_arrivals)


def launch_of(
    op: str,
    choice: Choice,
    out: torch.Tensor,
    a: torch.Tensor,
    layouts: tuple[Layout, Layout, Layout],
    numbers: tuple[int, ...],
) -> Launch:
    """The launch of a choice; numbers: the kernel's integers."""
    function = common.shipped(choice.cubin, f"{op}_{common.DTYPE_TOKENS[a.dtype]}_{choice.variant}")
    if choice.box_rows is None:
        return Launch(function, choice, numbers)
    # The kernel looks at the same numbers.
    out_has_map = out.dtype == a.dtype and not (layouts[0].columns | layouts[0].spans) % 8
    return Launch(
        function, choice, (*numbers, choice.group), layouts, out_has_map, {"programmatic": True}
    )


def tensor_map(tensor: torch.Tensor, layout: Layout, box_rows: int) -> bytes:
    """The tensor map for boxes of `box_rows` rows and 64 columns; made once."""
    key = (tensor.data_ptr(), tensor.dtype, layout, box_rows)
    found = _maps.get(key)
    if found is None:
        from ...arrays.tensor_map import TensorMap  # CPU tensors do without the runtime

        # A dimension of one element wants a stride all the same.
        stride = layout.stride if layout.rows > 1 else -(-layout.columns // 8) * 8
        inner = layout.inner_stride if layout.inner > 1 else stride
        outer = layout.outer_stride if layout.outer > 1 else stride
        found = TensorMap.tiled(
            tensor, (1, 1, box_rows, BLOCK_K), swizzle="128B", l2_promotion="256B",
            shape=(layout.outer, layout.inner, layout.rows, layout.columns),
            strides=(outer, inner, stride, 1),
        ).raw  # fmt: skip
        if len(_maps) >= _MAX_MAPS:
            _maps.clear()
        _maps[key] = found
    return found


def check_rows(op: str, argument: str, tensor: torch.Tensor, layout: Layout) -> None:
    """Rows must begin at multiples of 16 bytes."""
    if tensor.numel() and (layout.spans % 8 or tensor.data_ptr() % common.VEC_BYTES):
        raise common.refuse(
            op, argument, "rows that begin at multiples of 16 bytes (copy it first)", tensor
        )
