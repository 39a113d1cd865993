"""From tensors to a launch of linear or of a product of paired rows: strides, tensor maps,
workspace. Chooses nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core import common
from ..core.counters import counters
from ..core.device import SM80, device_of, overlaps_launches
from ..core.launch import Launch
from ..core.tensor_maps import Boxes, tensor_map
from .checks import misaligned, row_strides
from .linear_fp32_plan import choose as choose_fp32
from .linear_plan import MAX_SPLIT_TILES, choose
from .tiles import BLOCK_K, TileChoice

_OP = "linear"
# Of the product's rows and of the last of them, of its columns and of the last of these.
OperandBoxes = tuple[Boxes, Boxes, Boxes, Boxes]
ALONE = (None, None)  # the workspace of blocks that share nothing


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """A launch but for its pointers; `function` is None where there is nothing to compute."""

    function: Any
    choice: TileChoice | None = None
    numbers: tuple[int, ...] = ()
    boxes: OperandBoxes | None = None
    out_boxes: Boxes | None = None  # where results leave through boxes
    residual_boxes: Boxes | None = None  # where it arrives through boxes
    options: Mapping[str, bool] = field(default_factory=dict)  # of the launch

    def maps(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *residuals: torch.Tensor | None
    ) -> tuple[bytes, ...]:
        """The tensor maps of a call at new addresses; () where pointers are passed.

        residuals: the residual, of kernels that take a map of it.
        """
        if self.choice is None or self.boxes is None:
            return ()
        operands = operand_maps(self.choice, self.boxes, a, b)
        out_map = operands[0]  # not looked at where results leave from registers
        if self.out_boxes is not None and not out.data_ptr() % common.VEC_BYTES:
            out_map = tensor_map(out, self.out_boxes)
        written = [out_map]
        for residual in residuals:
            residual_map, added = out_map, self.residual_boxes
            if added and residual is not None and not residual.data_ptr() % common.VEC_BYTES:
                residual_map = tensor_map(residual, added)
            written.append(residual_map)
        return (*written, *operands)

    def run(self, maps: tuple[bytes, ...], out: torch.Tensor, a: Any, b: Any, *more: Any) -> None:
        """Launch on the current stream. more: the other pointers."""
        choice = self.choice
        assert choice is not None
        shared = workspace(choice, out.device) if choice.num_partials else ALONE
        operands = (*maps, *shared) if maps else (*shared, a, b)
        params = (out, *operands, *more, *self.numbers)
        self.function(choice.grid, choice.block, choice.shared_bytes, None, params, **self.options)


def plan_launch(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: int,
    residual: torch.Tensor | None, batch_invariant: bool, weights_ready: bool, out: torch.Tensor,
) -> LinearLaunch:  # fmt: skip
    """Choose the kernel and its integer parameters for tensors that were checked."""
    if out.numel() == 0:
        return LinearLaunch(None)
    k, n = a.shape[-1], b.shape[0]
    tensors = {"a": a, "out": out}
    if residual is not None:
        tensors["residual"] = residual
    m, strides = row_strides(_OP, a.shape[:-1], tensors)
    a_stride, out_stride, residual_stride = (*strides, 0)[:3]
    b_stride = b.stride(0)
    if m == 1:
        a_stride = k
    if n == 1:
        b_stride = k
    is_fp32, is_aligned = a.dtype == torch.float32, True
    for argument, tensor, stride in (("a", a, a_stride), ("b", b, b_stride)):
        begins = stride * tensor.element_size() | tensor.data_ptr()
        if not tensor.numel() or begins % common.VEC_BYTES == 0:
            continue
        is_aligned = False
        if not is_fp32:
            raise misaligned(_OP, argument, tensor)
    capability, num_sms, name = device_of(a.device)[:3]
    overlaps = [(m, a_stride, k), (n, b_stride, k)]
    if residual is not None:
        overlaps.append((m, residual_stride, n))
    if any(rows > 1 and stride < columns for rows, stride, columns in overlaps):
        capability = SM80  # rows that overlap, or an expanded one: pointers, no tensor maps
    is_wide = out.dtype != a.dtype
    has_residual = residual is not None
    if is_fp32:
        choice = choose_fp32(capability, num_sms, m, n, k, is_aligned, batch_invariant)
    else:
        choice = choose(
            capability, num_sms, m, n, k, is_wide, name, has_residual, b_stride, batch_invariant
        )
    token = common.DTYPE_TOKENS[a.dtype]
    suffix = "_fp32" if out.dtype != a.dtype else ""
    function = common.shipped(choice.cubin, f"linear_{token}_{choice.variant}{suffix}")
    # These kernels wait for the launch before themselves, so that their start overlaps its end.
    may_overlap = choice.overlaps and overlaps_launches(capability) and choice.cubin != "linear"
    options = {"programmatic": True} if may_overlap else {}
    last = (residual_stride, m, n, k, activation)
    leads = int(weights_ready and may_overlap)
    if choice.boxes is None:
        numbers: tuple[int, ...] = (out_stride, a_stride, b_stride, *last)
        if choice.cubin == "linear_small_m":
            numbers = (*numbers, leads)
        return LinearLaunch(function, choice, numbers, options=options)
    sides = (m, k, a_stride), (n, k, b_stride)
    boxes = operand_boxes(choice, *sides)
    out_boxes = residual_boxes = None
    if choice.out_box_rows and out.dtype == a.dtype:
        out_boxes, residual_boxes = result_boxes(choice, m, n, out_stride, residual_stride)
    numbers = (out_stride, *last, choice.group, choice.num_whole, choice.num_dealt, leads)
    return LinearLaunch(function, choice, numbers, boxes, out_boxes, residual_boxes, options)


def result_boxes(
    choice: TileChoice, m: int, n: int, out_stride: int, residual_stride: int
) -> tuple[Boxes | None, Boxes | None]:
    """The boxes of out and of the residual; None where rows begin off 16 bytes, or overlap."""
    if (n | out_stride) % 8:
        return None, None
    out, residual = (n if m == 1 else stride for stride in (out_stride, residual_stride))
    has_rows = residual >= n and not residual % 8
    added = boxes_of(m, n, residual, choice.out_box_rows) if has_rows else None
    return boxes_of(m, n, out, choice.out_box_rows), added


def operand_boxes(
    choice: TileChoice,
    a: tuple[int, int, int],
    b: tuple[int, int, int],
    dtype: torch.dtype | None = None,
) -> OperandBoxes:
    """The boxes of a choice; a, b: rows, columns and stride of each."""
    assert choice.boxes is not None
    first, second = (b, a) if choice.swaps else (a, b)
    rows, columns = choice.boxes
    tile = choice.tile
    last = second[0] % columns or columns if tile is None else tile.last_box(second[0])
    return (
        boxes_of(*first, rows, dtype),
        boxes_of(*first, first[0] % rows or rows, dtype),
        boxes_of(*second, columns, dtype),
        boxes_of(*second, last, dtype),
    )


def operand_maps(
    choice: TileChoice, boxes: OperandBoxes, a: torch.Tensor, b: torch.Tensor
) -> tuple[bytes, ...]:
    """Their tensor maps."""
    first, second = (b, a) if choice.swaps else (a, b)
    return (
        tensor_map(first, boxes[0]),
        tensor_map(first, boxes[1]),
        tensor_map(second, boxes[2]),
        tensor_map(second, boxes[3]),
    )


def workspace(choice: TileChoice, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of blocks that share k: their fp32 sums, counters of those that left them."""
    partials = torch.empty(choice.num_partials, dtype=torch.float32, device=device)
    # Few sizes: launches of one stream share a set of each.
    return partials, counters(device, choice.num_arrivals or MAX_SPLIT_TILES)


def boxes_of(
    rows: int, columns: int, stride: int, box_rows: int, dtype: torch.dtype | None = None
) -> Boxes:
    """Boxes of `box_rows` rows and 64 elements of a matrix."""
    return Boxes((rows, columns), (stride, 1), (box_rows, BLOCK_K), dtype)


def launch_of(
    op: str,
    choice: TileChoice,
    a: torch.Tensor,
    numbers: tuple[int | float, ...],
    *boxes: Boxes,
) -> Launch:
    """The launch of a choice. boxes: of a, of its last rows and of b, for kernels with maps."""
    function = common.shipped(choice.cubin, f"{op}_{common.DTYPE_TOKENS[a.dtype]}_{choice.variant}")
    # It may begin under the end of the launch before.
    options = {"programmatic": True} if device_of(a.device).overlaps_launches else {}
    return Launch(function, choice.grid, choice.block, choice.shared_bytes, numbers, boxes, options)


def row_boxes(choice: TileChoice, rows: int, k: int, stride: int) -> tuple[Boxes, Boxes]:
    """The boxes of a, and of its last rows."""
    tile = choice.tile
    height = tile.a_box_rows
    last = tile.last_box(rows) if tile.swaps else rows % height or height
    return boxes_of(rows, k, stride, height), boxes_of(rows, k, stride, last)


def maps_of(boxes: tuple[Boxes, ...], a: torch.Tensor, b: torch.Tensor) -> tuple[bytes, ...]:
    """The tensor maps of a call at new addresses; () where pointers are passed."""
    return tuple(tensor_map(x, box) for x, box in zip((a, a, b), boxes, strict=False))
