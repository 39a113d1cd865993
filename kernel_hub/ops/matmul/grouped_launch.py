"""What launches of grouped_linear and batched_matmul share: tensor maps, the device, pointers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core import bounds, common
from ..core.tensor_maps import Boxes, tensor_map
from .checks import misaligned
from .linear_launch import ALONE, workspace
from .tiles import BLOCK_K, TileChoice

_BOX_BYTES = 128  # of a row of a box: the span of the swizzle


@dataclass(frozen=True, slots=True)
class OperandLayout:
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

    def boxes(self, box_rows: int, box_columns: int = BLOCK_K) -> Boxes:
        """Boxes of `box_rows` rows and `box_columns` columns."""
        # A dimension of one element wants a stride all the same.
        stride = self.stride if self.rows > 1 else -(-self.columns // 8) * 8
        inner = self.inner_stride if self.inner > 1 else stride
        outer = self.outer_stride if self.outer > 1 else stride
        shape = (self.outer, self.inner, self.rows, self.columns)
        return Boxes(shape, (outer, inner, stride, 1), (1, 1, box_rows, box_columns))


@dataclass(frozen=True, slots=True)
class GroupedLaunch:
    """A launch but for its pointers; `function` is None where there is nothing to compute."""

    function: Any
    choice: TileChoice | None = None
    numbers: tuple[int, ...] = ()
    # Of a and b, where maps are passed: of each also of the last rows, where the kernel takes them.
    boxes: tuple[tuple[Boxes, ...], tuple[Boxes, ...]] | None = None
    out_boxes: Boxes | None = None  # where results leave through boxes
    options: Mapping[str, bool] = field(default_factory=dict)

    def maps(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, residual: None = None
    ) -> tuple[bytes, ...]:
        """The tensor maps of a call at new addresses; () where pointers are passed."""
        if self.boxes is None:
            return ()
        operands = [
            tensor_map(x, at) for x, of in zip((a, b), self.boxes, strict=True) for at in of
        ]
        out_map = operands[0]  # not looked at where no boxes leave
        if self.out_boxes is not None and not out.data_ptr() % common.VEC_BYTES:
            out_map = tensor_map(out, self.out_boxes)
        return (out_map, *operands)

    def run(
        self, maps: tuple[bytes, ...], out: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
        *more: Any,
    ) -> None:  # fmt: skip
        """Launch on the current stream. more: the other pointers, a table first if there is one."""
        choice = self.choice
        assert choice is not None
        outs: tuple[Any, ...] = (out, None) if out.dtype == a.dtype else (None, out)
        if more:
            outs = (*outs, bounds.flag("grouped_linear", a))
        if maps:
            shared = workspace(choice, out.device) if choice.num_partials else ALONE
            params: tuple[Any, ...] = (*outs, *shared, *maps, *more, *self.numbers)
        else:
            params = (*outs, a, b, *more, *self.numbers)
        self.function(choice.grid, choice.block, choice.shared_bytes, None, params, **self.options)


def launch_of(
    op: str, choice: TileChoice, out: torch.Tensor, a: torch.Tensor,
    layouts: tuple[OperandLayout, OperandLayout, OperandLayout], numbers: tuple[int, ...],
) -> GroupedLaunch:  # fmt: skip
    """The launch of a choice; numbers: the kernel's integers."""
    function = common.shipped(choice.cubin, f"{op}_{common.DTYPE_TOKENS[a.dtype]}_{choice.variant}")
    if choice.boxes is None:
        return GroupedLaunch(function, choice, numbers)
    to, *operands = layouts
    out_rows, *heights = choice.boxes
    boxes: list[tuple[Boxes, ...]]
    if op == "grouped_linear":
        boxes = [(at.boxes(rows),) for at, rows in zip(operands, heights, strict=True)]
    else:
        boxes = [
            (at.boxes(rows), at.boxes(at.rows % rows or rows))
            for at, rows in zip(operands, heights, strict=True)
        ]
    # The kernels look at the same numbers. The copy engine stores 16 bytes or none of them.
    size = out.element_size()
    has_map = (to.columns | to.spans) * size % common.VEC_BYTES == 0
    out_boxes = to.boxes(out_rows, _BOX_BYTES // size) if has_map else None
    return GroupedLaunch(
        function, choice, (*numbers, choice.group), (boxes[0], boxes[1]), out_boxes,
        {"programmatic": True},
    )  # fmt: skip


def check_rows(op: str, argument: str, tensor: torch.Tensor, layout: OperandLayout) -> None:
    """Rows must begin at multiples of 16 bytes."""
    if tensor.numel() and (layout.spans % 8 or tensor.data_ptr() % common.VEC_BYTES):
        raise misaligned(op, argument, tensor)
