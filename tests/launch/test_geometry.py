"""Launch geometry and attributes: every limit is refused with its value and its origin."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from kernel_hub.errors import LaunchConfigError
from kernel_hub.launch.geometry import CONFIG, LaunchOptions, Limits, check, dims


def limits(**changes: Any) -> Limits:
    given: dict[str, Any] = {
        "function": "f", "device_name": "NVIDIA H200", "compute_capability": (9, 0),
        "max_grid": (2**31 - 1, 65535, 65535), "max_block": (1024, 1024, 64), "max_threads": 512,
        "required_block": None, "static_shared_bytes": 1024,
        "max_dynamic_shared_bytes": 232448 - 1024, "cluster": None, "num_multiprocessors": 132,
    }  # fmt: skip
    return Limits(**{**given, **changes})


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (3, (3, 1, 1)),
        ((3,), (3, 1, 1)),
        ([3, 4], (3, 4, 1)),
        ((3, 4, 5), (3, 4, 5)),
        (np.int32(7), (7, 1, 1)),
        (np.array([1, 2, 3]), (1, 2, 3)),
        ((np.int64(2), 1, 1), (2, 1, 1)),
    ],
)
def test_dims(given: Any, made: tuple[int, int, int]) -> None:
    assert dims(given, "gridDim", "f") == made


@pytest.mark.parametrize("wrong", [1.0, "1", None, (), (1, 2, 3, 4), (1.5, 1, 1), ("1",), {}])
def test_dims_refuses(wrong: Any) -> None:
    with pytest.raises(LaunchConfigError, match="gridDim"):
        dims(wrong, "gridDim", "f")


@pytest.mark.parametrize(
    ("grid", "block", "shared", "says"),
    [
        (0, 1, 0, "gridDim"),
        (-1, 1, 0, "gridDim"),
        ((1, 65536, 1), 1, 0, "65535"),
        (2**31, 1, 0, "2147483647"),
        (1, 0, 0, "blockDim"),
        (1, (1, 1, 65), 0, "64"),
        (1, 513, 0, "512"),
        (1, (32, 32, 1), 0, "__launch_bounds__"),
        (1, 1, -1, "sharedMemBytes=-1"),
        (1, 1, 232448, "231424"),
        (1, 1, "x", "sharedMemBytes"),
    ],
)
def test_geometry_refusals(grid: Any, block: Any, shared: Any, says: str) -> None:
    with pytest.raises(LaunchConfigError) as caught:
        check(limits(), grid, block, shared, LaunchOptions())
    assert says in str(caught.value)
    assert "f on NVIDIA H200" in str(caught.value)


def test_geometry_accepts_the_limits_themselves() -> None:
    made = check(limits(), (2**31 - 1, 65535, 65535), (512, 1, 1), 231424, LaunchOptions())
    assert made == (2**31 - 1, 65535, 65535, 512, 1, 1, 231424)


def test_required_block() -> None:
    needs = limits(required_block=(128, 1, 1))
    assert check(needs, 1, 128, 0, LaunchOptions())[3:6] == (128, 1, 1)
    with pytest.raises(LaunchConfigError, match=r"exactly \(128, 1, 1\)"):
        check(needs, 1, 64, 0, LaunchOptions())


def test_clusters() -> None:
    options = LaunchOptions.make(limits(), (2, 1, 1), False, False, None, None)
    assert check(limits(), 4, 32, 0, options)[0] == 4
    with pytest.raises(LaunchConfigError, match="multiple of cluster"):
        check(limits(), 3, 32, 0, options)
    for wrong in ((0, 1, 1), (32, 1, 1)):
        with pytest.raises(LaunchConfigError, match="cluster"):
            LaunchOptions.make(limits(), wrong, False, False, None, None)
    with pytest.raises(LaunchConfigError, match=r"compute capability 9\.0"):
        LaunchOptions.make(limits(compute_capability=(8, 9)), 2, False, False, None, None)
    with pytest.raises(LaunchConfigError, match="compiled for"):
        LaunchOptions.make(limits(cluster=(4, 1, 1)), 2, False, False, None, None)
    with pytest.raises(LaunchConfigError, match="multiple of cluster"):
        check(limits(cluster=(4, 1, 1)), 6, 32, 0, LaunchOptions())


def test_attributes_are_72_bytes_each() -> None:
    options = LaunchOptions.make(limits(), (2, 2, 1), True, True, -3, 50)
    encoded = options.encode()
    assert len(encoded) == 72 * 5
    at = {struct.unpack_from("<I", encoded, i)[0]: i + 8 for i in range(0, 360, 72)}
    assert struct.unpack_from("<3I", encoded, at[4]) == (2, 2, 1)
    assert struct.unpack_from("<i", encoded, at[2]) == (1,)
    assert struct.unpack_from("<i", encoded, at[6]) == (1,)
    assert struct.unpack_from("<i", encoded, at[8]) == (-3,)
    assert struct.unpack_from("<I", encoded, at[14]) == (50,)
    assert CONFIG.size == 56
    with pytest.raises(LaunchConfigError, match="carveout=101"):
        LaunchOptions.make(limits(), None, False, False, None, 101)
