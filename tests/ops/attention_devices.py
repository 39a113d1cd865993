"""Lets attention choose its kernels as for another GPU, or for none at all (the emulator)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from kernel_hub.ops.core.device import PlannedGpu
from kernel_hub.ops.core.launch import forget_all

FORWARD: Any = importlib.import_module("kernel_hub.ops.attention.forward_portable")
BACKWARD: Any = importlib.import_module("kernel_hub.ops.attention.backward.portable")
KIB = 1024
T = TypeVar("T")
# Compute capability -> KiB of shared memory a block may have.
DEVICES = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227}


def taken(patch: pytest.MonkeyPatch, module: Any, what: Callable[..., T]) -> list[T]:
    """From here on what(*arguments) of each launch by `module`, which runs as before."""
    found: list[T] = []
    launch = module.launch

    def counted(*given: Any) -> None:
        found.append(what(*given))
        launch(*given)

    patch.setattr(module, "launch", counted)
    return found


def pretend(
    patch: pytest.MonkeyPatch, capability: tuple[int, int], multiprocessors: int = 132
) -> None:
    """Choose as on such a device from here on. Few multiprocessors: enough blocks to fill them."""
    shared_bytes = DEVICES[capability] * KIB
    device = PlannedGpu(capability, multiprocessors, "", shared_bytes, shared_bytes + KIB)
    for module in (FORWARD, BACKWARD):
        patch.setattr(module, "device_of", lambda _: device)
    forget_all()
