"""From tensors to the launch of a product of paired rows: strides, tensor maps, the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core import common
from ..core.tensor_maps import Boxes, tensor_map
from .tiles import TileChoice


@dataclass(frozen=True, slots=True)
class PairedPlan:
    """A launch but for its pointers; `choice` is None where there is nothing to compute.

    boxes: of a, of its last rows and of b, where the kernel takes tensor maps.
    """

    function: Any
    choice: TileChoice | None = None
    numbers: tuple[int, ...] = ()
    boxes: tuple[Boxes, Boxes, Boxes] | None = None
    is_programmatic: bool = False  # may begin under the end of the launch before

    def maps(self, a: torch.Tensor, b: torch.Tensor) -> tuple[bytes, ...]:
        """The tensor maps of a call at new addresses; () where pointers are passed."""
        if self.boxes is None:
            return ()
        rows, last, weights = self.boxes
        return tensor_map(a, rows), tensor_map(a, last), tensor_map(b, weights)

    def run(self, params: tuple[Any, ...]) -> None:
        """Launch on the current stream. params: all but the numbers."""
        choice = self.choice
        assert choice is not None
        options = {"programmatic": True} if self.is_programmatic else {}
        self.function(
            choice.grid, choice.block, choice.shared_bytes, None, (*params, *self.numbers),
            **options,
        )  # fmt: skip


def rows_and_strides(
    op: str, a: torch.Tensor, argument: str, b: torch.Tensor, *others: torch.Tensor
) -> tuple[int, tuple[int, ...], int]:
    """(rows of a, the row strides of a and of `others`, that of b), refusing misaligned rows.

    others: tensors with the leading dimensions of a.
    """
    k = a.shape[-1]
    tensors = [a, *others]
    (m,), columns = common.collapse(
        op, a.shape[:-1], [tensor.stride()[: a.dim() - 1] for tensor in tensors], groups=1
    )
    if m > common.MAX_SIZE:
        raise common.refuse(op, "a", f"at most {common.MAX_SIZE} rows", a)
    strides = [column[0] for column in columns]
    b_stride = b.stride(0)
    if m == 1:
        strides[0] = k
    if b.shape[0] == 1:
        b_stride = k
    for name, tensor, stride in (("a", a, strides[0]), (argument, b, b_stride)):
        if tensor.numel() and (stride % 8 or tensor.data_ptr() % common.VEC_BYTES):
            raise common.refuse(
                op, name, "rows that begin at multiples of 16 bytes (copy it first)", tensor
            )
    return m, tuple(strides), b_stride
