"""Lets attention choose its kernels as for another GPU, or for none at all (the emulator)."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

from kernel_hub.ops.core.launch import forget_all

FORWARD: Any = importlib.import_module("kernel_hub.ops.attention.forward_portable")
BACKWARD: Any = importlib.import_module("kernel_hub.ops.attention.backward_portable")
KIB = 1024
# Compute capability -> KiB of shared memory a block may have.
DEVICES = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227}


def pretend(
    patch: pytest.MonkeyPatch, capability: tuple[int, int], multiprocessors: int = 132
) -> None:
    """Choose as on such a device from here on. Few multiprocessors: enough blocks to fill them."""
    shared_bytes = DEVICES[capability] * KIB
    limits = dataclasses.replace(
        FORWARD.device_limits(None),
        compute_capability=capability,
        shared_bytes=shared_bytes,
        sm_shared_bytes=shared_bytes + KIB,
    )
    patch.setattr(FORWARD, "device_limits", lambda _: limits)
    patch.setattr(BACKWARD, "_device", lambda _: (capability, multiprocessors))
    forget_all()
