"""From tensors to the launch of a product of paired rows: strides, tensor maps, the launch."""

from __future__ import annotations

import torch

from ..core import common
from ..core.device import device_of
from ..core.launch import Launch
from ..core.tensor_maps import Boxes, tensor_map
from .linear_launch import boxes_of
from .tiles import TileChoice


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
    height = choice.tile.a_box_rows
    return boxes_of(rows, k, stride, height), boxes_of(rows, k, stride, rows % height or height)


def maps_of(boxes: tuple[Boxes, ...], a: torch.Tensor, b: torch.Tensor) -> tuple[bytes, ...]:
    """The tensor maps of a call at new addresses; () where pointers are passed."""
    return tuple(tensor_map(x, box) for x, box in zip((a, a, b), boxes, strict=False))
