"""Hopper's kernels on the CPU: what emulated.py runs, with tensor maps and clusters.

They were right on a GPU first: what they need is what the emulator was held against.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch
from emulated import EmulatedFunction

from kernel_hub.arrays import tensor_map
from kernel_hub.ops.core import tensor_maps
from kernel_hub.ops.core.device import launch_sizes
from kernel_hub.ops.core.tensor_maps import Boxes

_MAX_RANK = 5


def make_map(key: tuple[Any, ...], tensor: torch.Tensor, boxes: Boxes) -> bytes:
    """In place of `tensor_maps.make`: emulator::Map of emulator/kernel_hub/tma.cuh."""
    elements = tensor if boxes.dtype is None else tensor.view(boxes.dtype)
    item_bytes, address = elements.element_size(), elements.data_ptr()
    name = str(elements.dtype).removeprefix("torch.")
    tensor_map._check_tensor(address, name, item_bytes, boxes.shape, boxes.strides)
    steps, swizzle = (1,) * len(boxes.box), tensor_map._SWIZZLES["128B"]
    tensor_map._check_box(boxes.shape, boxes.box, steps, item_bytes, "128B", swizzle)

    def inner_first(values: Sequence[int], factor: int = 1) -> list[int]:
        padding = [1] * (_MAX_RANK - len(values))
        return [factor * value for value in reversed(values)] + padding

    words = (
        address, len(boxes.shape), item_bytes, 1, *inner_first(boxes.shape),
        *inner_first(boxes.strides, item_bytes), *inner_first(boxes.box),
    )  # fmt: skip
    tensor_maps.known[key] = made = struct.pack(f"{len(words)}q", *words)
    return made


class HopperFunction(EmulatedFunction):
    """A kernel of either kind; a tensor map travels as the address of its bytes."""

    def __init__(self, cubin: str, name: str) -> None:
        super().__init__(cubin, name)
        sizes = launch_sizes(cubin, name) if cubin.endswith("_sm90") else {}
        for field in ("cluster_m", "cluster_n", "splits"):
            self._cluster *= max(1, sizes.get(field, 1))

    def run(self, *shape: Any, params: Sequence[Any], cluster: Sequence[int]) -> None:
        kept = {i: ctypes.create_string_buffer(p) for i, p in enumerate(params) if type(p) is bytes}
        given = [ctypes.addressof(kept[i]) if i in kept else p for i, p in enumerate(params)]
        super().run(*shape, params=given, cluster=cluster)
