"""TensorMap on the stand-in driver, whose descriptor holds the arguments as it got them."""

from __future__ import annotations

import gc
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda

from kernel_hub.arrays.device_array import DeviceArray
from kernel_hub.arrays.tensor_map import TensorMap
from kernel_hub.errors import CudaDriverError, LaunchConfigError, TensorError


def arguments(raw: bytes) -> dict[str, Any]:
    """The stand-in's 128 bytes (TensorMapDigest in fake_memory.c)."""
    fields = struct.unpack_from("<6B5B5x10Q5H", raw)
    dtype, rank, interleave, swizzle, l2_promotion, oob_fill, *rest = fields
    return {
        "dtype": dtype,
        "interleave": interleave,
        "swizzle": swizzle,
        "l2_promotion": l2_promotion,
        "oob_fill": oob_fill,
        "element_strides": tuple(rest[:rank]),
        "address": rest[5],
        "dims": tuple(rest[6 : 6 + rank]),
        "strides": tuple(rest[11 : 11 + rank - 1]),
        "box": tuple(rest[15 : 15 + rank]),
    }


def test_what_the_driver_gets(fakecuda: FakeCuda) -> None:
    tensor = DeviceArray.empty((4, 6, 64), "bf16")
    made = TensorMap.tiled(
        tensor,
        (2, 3, 32),
        swizzle="64B",
        l2_promotion="256B",
        oob_fill="nan",
        element_strides=(1, 2, 1),
    )
    assert len(made.raw) == 128
    assert arguments(made.raw) == {
        "dtype": 9,
        "interleave": 0,
        "swizzle": 2,
        "l2_promotion": 3,
        "oob_fill": 1,
        "element_strides": (1, 2, 1),
        "address": tensor.ptr,
        "dims": (64, 6, 4),
        "strides": (128, 768),
        "box": (32, 3, 2),
    }
    assert made._as_bytes() == made.raw
    assert made.data_address % 64 == 0
    for part in ("(4, 6, 64)", "(384, 64, 1)", "bf16", "(2, 3, 32)", "64B", "256B", "nan"):
        assert part in repr(made)


def test_defaults(fakecuda: FakeCuda) -> None:
    made = TensorMap.tiled(DeviceArray.empty((8, 16)), [8, 16])
    seen = arguments(made.raw)
    assert (seen["swizzle"], seen["l2_promotion"], seen["oob_fill"]) == (0, 2, 0)
    assert seen["element_strides"] == (1, 1)
    assert TensorMap.tiled(DeviceArray.empty((8, 16)), [8, 16], swizzle=None).swizzle == "none"


@pytest.mark.parametrize(
    ("token", "code"),
    [
        ("uint8", 0),
        ("int8", 0),
        ("e4m3", 0),
        ("e5m2", 0),
        ("uint16", 1),
        ("int16", 1),
        ("uint32", 2),
        ("int32", 3),
        ("uint64", 4),
        ("int64", 5),
        ("fp16", 6),
        ("fp32", 7),
        ("fp64", 8),
        ("bf16", 9),
    ],
)
def test_dtypes(fakecuda: FakeCuda, token: str, code: int) -> None:
    tensor = DeviceArray.empty((32, 64), token)
    assert arguments(TensorMap.tiled(tensor, (8, 16)).raw)["dtype"] == code
    if token in ("fp16", "fp32", "fp64", "bf16"):
        TensorMap.tiled(tensor, (8, 16), oob_fill="nan")
    else:
        with pytest.raises(LaunchConfigError, match=f"nan.*not {token}"):
            TensorMap.tiled(tensor, (8, 16), oob_fill="nan")


def test_views(fakecuda: FakeCuda) -> None:
    tensor = DeviceArray.empty((16, 64), "fp16")
    seen = arguments(TensorMap.tiled(tensor[2::2, 8:], (4, 16)).raw)
    assert seen["address"] == tensor.ptr + 2 * 128 + 16
    assert (seen["dims"], seen["strides"]) == ((56, 7), (256,))
    rank1 = arguments(TensorMap.tiled(tensor[3], (16,)).raw)
    assert (rank1["dims"], rank1["strides"], rank1["box"]) == ((64,), (), (16,))


def test_lengths_of_one_have_no_meaningful_stride(fakecuda: FakeCuda) -> None:
    tensor = DeviceArray.from_address(1 << 20, (1, 3, 1), "fp32")
    tensor.strides = (7, 4, 9)
    seen = arguments(TensorMap.tiled(tensor, (1, 1, 4)).raw)
    assert (seen["dims"], seen["strides"]) == ((1, 3, 1), (16, 48))


def test_shape_and_strides_of_ones_own(fakecuda: FakeCuda) -> None:
    pages = DeviceArray.empty((1024,), "fp16")
    seen = arguments(TensorMap.tiled(pages, (1, 8, 16), shape=(4, 8, 16)).raw)
    assert (seen["dims"], seen["strides"]) == ((16, 8, 4), (32, 256))
    seen = arguments(TensorMap.tiled(pages, (8, 16), shape=(5, 20), strides=(32, 1)).raw)
    assert (seen["dims"], seen["strides"]) == ((20, 5), (64,))
    with pytest.raises(TensorError, match="do not match the rank"):
        TensorMap.tiled(pages, (8, 16), shape=(5, 20), strides=(1,))


# ---- refusals ----


def refused(
    make: Callable[[], Any], box: Any, kind: type[Exception], match: str, **options: Any
) -> Any:
    return pytest.param(make, box, kind, match, options, id=match)


def option(match: str, **options: Any) -> Any:
    return refused(lambda: strided((16, 1)), (8, 16), LaunchConfigError, match, **options)


def strided(strides: tuple[int, ...], shape: tuple[int, ...] = (8, 16), ptr: int = 1 << 20) -> Any:
    array = DeviceArray.from_address(ptr, shape, "fp32")
    array.strides = strides
    return array


@pytest.mark.parametrize(
    ("make", "box", "kind", "match", "options"),
    [
        refused(lambda: DeviceArray.empty(()), (), TensorError, "rank 0: .* 1 to 5"),
        refused(
            lambda: DeviceArray.empty((1, 1, 1, 1, 1, 16)),
            (1,) * 6,
            TensorError,
            "rank 6: .* 1 to 5",
        ),
        refused(lambda: strided((16, 1), ptr=1 << 20 | 8), (8, 16), TensorError, "0x100008 is not"),
        refused(lambda: strided((18, 1)), (8, 16), TensorError, "stride 0 is 18 .*= 72 bytes"),
        refused(lambda: strided((1 << 38, 1)), (8, 16), TensorError, r"below 2\*\*40"),
        refused(lambda: strided((-16, 1)), (8, 16), TensorError, "stride 0 is -16"),
        refused(lambda: strided((1, 8)), (8, 16), TensorError, "last dimension has stride 8"),
        refused(lambda: DeviceArray.empty((0, 16)), (8, 16), TensorError, "dimension 0 .* is 0"),
        refused(
            lambda: strided((16, 1), ((1 << 32) + 1, 16)), (8, 16), TensorError, "is 4294967297"
        ),
        refused(lambda: DeviceArray.empty((8, 16), "bool"), (8, 16), TensorError, "of bool"),
        refused(lambda: np.zeros((8, 16)), (8, 16), TensorError, "on the CPU|CUDA memory"),
        refused(lambda: "tensor", (8, 16), TensorError, "not str"),
        refused(lambda: strided((16, 1)), (8,), LaunchConfigError, "has 1 entries; .* rank 2"),
        refused(lambda: strided((16, 1)), (0, 16), LaunchConfigError, r"box\[0\] is 0 .* 1 to 256"),
        refused(lambda: strided((16, 1)), (257, 16), LaunchConfigError, r"box\[0\] is 257"),
        refused(lambda: strided((16, 1)), (8, 6), LaunchConfigError, "6 elements = 24 bytes"),
        refused(
            lambda: strided((256, 1), (512, 256)),
            (229, 256),
            LaunchConfigError,
            "234,496 bytes: more than the 233,472",
        ),
        refused(lambda: strided((16, 1)), (8.0, 16), LaunchConfigError, "sequence of ints"),
        refused(lambda: strided((16, 1)), 8, LaunchConfigError, "box=8: expected"),
        option("at most 32 bytes", swizzle="32B"),
        refused(
            lambda: strided((64, 1), (8, 64)),
            (8, 64),
            LaunchConfigError,
            "with swizzle '128B' at most 128 bytes",
            swizzle="128B",
        ),
        option("swizzle='256B': expected one of", swizzle="256B"),
        option("l2_promotion=64", l2_promotion=64),
        option("oob_fill='one'", oob_fill="one"),
        option(r"element_strides\[0\] is 9: each is 1 to 8", element_strides=(9, 1)),
        option(r"element_strides\[-1\] is 2", element_strides=(1, 2)),
        option(r"element_strides=\(1,\) has 1 entries", element_strides=(1,)),
    ],
)
def test_refused_before_the_driver(
    fakecuda: FakeCuda,
    make: Callable[[], Any],
    box: Any,
    kind: type[Exception],
    match: str,
    options: dict[str, Any],
) -> None:
    tensor = make()
    with pytest.raises(kind, match=match):
        TensorMap.tiled(tensor, box, **options)
    assert fakecuda.calls("cuTensorMapEncodeTiled") == 0


def test_freed_tensor(fakecuda: FakeCuda) -> None:
    tensor = DeviceArray.empty((8, 16))
    made = TensorMap.tiled(tensor, (8, 16))
    tensor.free()
    with pytest.raises(TensorError, match="freed"):
        TensorMap.tiled(tensor, (8, 16))
    with pytest.raises(TensorError, match="freed"):
        made._as_bytes()


def test_gpu_without_tma(make_fakecuda: Callable[..., FakeCuda]) -> None:
    make_fakecuda(capability=(8, 0))
    with pytest.raises(LaunchConfigError, match=r"compute capability 8\.0.* has no TMA"):
        TensorMap.tiled(DeviceArray.empty((8, 16)), (8, 16))


def test_driver_refusal_shows_the_arguments(fakecuda: FakeCuda) -> None:
    tensor = DeviceArray.empty((8, 16))
    fakecuda.fail("cuTensorMapEncodeTiled", 1)
    with pytest.raises(CudaDriverError, match=r"encoding TensorMap\(address=.*box=\(8, 16\)"):
        TensorMap.tiled(tensor, (8, 16))
    TensorMap.tiled(tensor, (8, 16))


def test_keeps_the_tensor_alive(fakecuda: FakeCuda) -> None:
    made = TensorMap.tiled(DeviceArray.empty((8, 16)), (8, 16))
    gc.collect()
    assert fakecuda.live_allocations == 1
    made._record_use(7)
    assert made.tensor.__cuda_array_interface__["stream"] == 7
    made.tensor._record_use(0)
    del made
    gc.collect()
    assert fakecuda.live_allocations == 0


def test_equality_and_pickling(fakecuda: FakeCuda) -> None:
    tensor = DeviceArray.empty((8, 16))
    one, same = (TensorMap.tiled(tensor, (8, 16)) for _ in range(2))
    other = TensorMap.tiled(tensor, (4, 16))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != one.raw
    with pytest.raises(TypeError, match=r"TensorMap\.tiled"):
        TensorMap()
    with pytest.raises(TypeError, match="address of this process"):
        pickle.dumps(one)
