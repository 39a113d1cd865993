"""TensorMap on a real GPU: descriptors the hardware reads, copied by a kernel compiled here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kernel_hub import Kernel
from kernel_hub.arrays import dtypes
from kernel_hub.arrays.device_array import DeviceArray
from kernel_hub.arrays.tensor_map import TensorMap
from kernel_hub.driver import get
from kernel_hub.errors import LaunchConfigError


@pytest.fixture(scope="module")
def tma_copy(compile_cuda: Callable[..., Path]) -> Kernel:
    """tests/gpu/tma_copy.cu."""
    if get().compute_capability(0) != (9, 0):
        pytest.skip("tma_copy.cu is compiled for compute capability 9.0")
    cubin = compile_cuda("tma_copy.cu", "-cubin", "-arch=sm_90a")
    return Kernel(
        cubin, signatures={"tma_copy_2d": ["unsigned char*", "CUtensorMap", "int", "int", "int"]}
    )


def copy_tile(
    kernel: Kernel, made: TensorMap, row: int, col: int, host_dtype: np.dtype
) -> np.ndarray:
    rows, cols = made.box
    tile_bytes = rows * cols * host_dtype.itemsize
    out = DeviceArray.zeros(tile_bytes, "uint8")
    kernel.tma_copy_2d(1, 128, tile_bytes + 8, params=[out, made, col, row, tile_bytes])
    return out.to_numpy().view(host_dtype).reshape(rows, cols)


@pytest.mark.parametrize("token", ["fp32", "fp16", "int32", "uint8", "e4m3", "fp64", "int64"])
@pytest.mark.parametrize("corner", [(0, 0), (4, 16), (13, 48), (-3, -16)])
def test_tile(tma_copy: Kernel, token: str, corner: tuple[int, int]) -> None:
    kind = dtypes.of(token)
    host = (1 + np.arange(16 * 64) % 100).reshape(16, 64).astype(kind.raw)
    tensor = DeviceArray.empty((16, 64), token)
    tensor.view(kind.raw).copy_from(host)
    box = (8, 32)
    made = TensorMap.tiled(tensor, box)
    tile = copy_tile(tma_copy, made, *corner, host.dtype)
    padded = np.zeros((16 + 2 * 8, 64 + 2 * 32), host.dtype)
    padded[8:24, 32:96] = host
    row, col = corner[0] + 8, corner[1] + 32
    np.testing.assert_array_equal(tile, padded[row : row + 8, col : col + 32])


def test_outside_as_nan(tma_copy: Kernel) -> None:
    host = np.ones((8, 16), np.float32)
    made = TensorMap.tiled(DeviceArray.from_numpy(host), (8, 16), oob_fill="nan")
    tile = copy_tile(tma_copy, made, 4, 8, host.dtype)
    assert (tile[:4, :8] == 1).all()
    assert np.isnan(tile[4:]).all()
    assert np.isnan(tile[:, 8:]).all()


def test_strided_rows(tma_copy: Kernel) -> None:
    host = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)
    view = DeviceArray.from_numpy(host)[1::2, 4:60]
    tile = copy_tile(tma_copy, TensorMap.tiled(view, (4, 8)), 2, 12, host.dtype)
    np.testing.assert_array_equal(tile, host[1::2, 4:60][2:6, 12:20])


@pytest.mark.parametrize(("swizzle", "span"), [("32B", 32), ("64B", 64), ("128B", 128)])
def test_swizzle(tma_copy: Kernel, swizzle: str, span: int) -> None:
    """The 16-byte chunk at (row, chunk) lands at chunk ^ (row's place in the pattern)."""
    cols = span // 4
    host = np.arange(16 * cols, dtype=np.float32).reshape(16, cols)
    made = TensorMap.tiled(DeviceArray.from_numpy(host), (16, cols), swizzle=swizzle)
    tile = copy_tile(tma_copy, made, 0, 0, host.dtype)
    chunks = span // 16
    expected = np.empty_like(host)
    for row in range(16):
        pattern = (row * span // 128) % chunks
        for chunk in range(chunks):
            at = 4 * (chunk ^ pattern)
            expected[row, at : at + 4] = host[row, 4 * chunk : 4 * chunk + 4]
    np.testing.assert_array_equal(tile, expected)


def test_torch_tensor(tma_copy: Kernel) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.arange(16 * 64, dtype=torch.float32, device="cuda").reshape(16, 64)
    made = TensorMap.tiled(tensor[2:, 8:], (8, 16))
    out = torch.zeros(8, 16, device="cuda")
    tma_copy.tma_copy_2d(
        1, 128, 512 + 8, params=[out.view(torch.uint8).reshape(-1), made, 16, 3, 512]
    )
    assert torch.equal(out, tensor[2:, 8:][3:11, 16:32])


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("token", ["uint8", "bf16", "fp32", "int64", "uint64", "uint16", "uint32"])
def test_driver_takes_what_the_checks_let_through(rank: int, token: str) -> None:
    kind = dtypes.of(token)
    tensor = DeviceArray.empty((3,) * (rank - 1) + (256,), token)
    for inner in (16 // kind.size_bytes, 128 // kind.size_bytes, 256):
        for step in (1, 2, 8):
            outer = (1, 2, 256, 5)[: rank - 1]
            while np.prod(outer) * inner * kind.size_bytes > 233472:
                outer = tuple(max(1, length // 2) for length in outer)
            TensorMap.tiled(
                tensor,
                (*outer, inner),
                element_strides=(step,) * (rank - 1) + (1,),
                swizzle="128B" if inner * kind.size_bytes <= 128 else "none",
                l2_promotion=("none", "64B", "128B", "256B")[rank % 4],
            )


def test_largest_box() -> None:
    tensor = DeviceArray.empty((4, 256, 256), "uint8")
    TensorMap.tiled(tensor, (4, 228, 256))
    with pytest.raises(LaunchConfigError, match="233,472 bytes of shared memory"):
        TensorMap.tiled(tensor, (4, 229, 256))
