"""DeviceArray on the stand-in driver: copies, dtypes, views."""

from __future__ import annotations

import numpy as np
import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import run_child

from kernel_hub.arrays import dtypes, interop
from kernel_hub.arrays.device_array import DeviceArray
from kernel_hub.errors import TensorError

TOKENS = sorted(dtypes.DTYPES)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bool", "int8", "uint64"])
@pytest.mark.parametrize("shape", [(), (1,), (127,), (3, 5), (2, 3, 4), (0,), (4, 0, 2)])
def test_round_trip(fakecuda: FakeCuda, dtype: str, shape: tuple[int, ...]) -> None:
    host = (np.arange(np.prod(shape, dtype=int)) % 97).astype(dtype).reshape(shape)
    array = DeviceArray.from_numpy(host)
    assert array.shape == shape
    assert array.dtype == host.dtype
    assert array.size_bytes == host.nbytes
    assert array.ndim == host.ndim
    back = array.to_numpy()
    assert back.dtype == host.dtype
    np.testing.assert_array_equal(back, host)
    assert fakecuda.live_allocations == (1 if host.size else 0)
    del array
    assert fakecuda.live_allocations == 0


def test_host_layouts_that_are_not_row_major(fakecuda: FakeCuda) -> None:
    host = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    for odd in (host.T, host[:, ::2], host[::-1], np.asfortranarray(host), host.astype(">f4")):
        np.testing.assert_array_equal(DeviceArray.from_numpy(odd).to_numpy(), odd)
    np.testing.assert_array_equal(DeviceArray.from_numpy([1.0, 2.0]).to_numpy(), [1.0, 2.0])


@pytest.mark.parametrize("bad", [np.zeros(2, complex), np.array(["a"]), np.array([None])])
def test_host_dtype_refused(fakecuda: FakeCuda, bad: np.ndarray) -> None:
    with pytest.raises(TensorError, match="not supported; the tokens are"):
        DeviceArray.from_numpy(bad)
    assert fakecuda.live_allocations == 0


@pytest.mark.parametrize("token", TOKENS)
def test_tokens(fakecuda: FakeCuda, token: str) -> None:
    array = DeviceArray.zeros((3, 8), token)
    assert array.dtype_token == token
    assert array.size_bytes == 24 * dtypes.DTYPES[token].size_bytes
    assert array.to_numpy().tobytes() == bytes(array.size_bytes)
    described = interop.describe(array)
    assert described is not None
    assert (described.address, described.dtype, described.device) == (array.ptr, token, 0)
    assert described.strides == array.strides


def test_bfloat16_with_ml_dtypes(fakecuda: FakeCuda) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    host = np.array([1.0, -2.5, 3.0], ml_dtypes.bfloat16)
    array = DeviceArray.from_numpy(host)
    assert array.dtype_token == "bf16"
    np.testing.assert_array_equal(array.to_numpy(), host)


def test_bfloat16_without_ml_dtypes(fakecuda: FakeCuda) -> None:
    done = run_child(
        fakecuda,
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import numpy as np\n"
        "from kernel_hub.arrays.device_array import DeviceArray\n"
        "array = DeviceArray.zeros((2, 3), 'bf16')\n"
        "array.copy_from(np.full((2, 3), 0x3F80, np.uint16))\n"
        "raw = array[:, ::2].to_numpy()\n"
        "assert raw.dtype == np.uint16 and raw.tolist() == [[0x3F80] * 2] * 2, raw\n"
        "assert array.dtype_token == 'bf16'\n"
        "assert DeviceArray.zeros(2, 'e4m3').to_numpy().dtype == np.uint8\n",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_dtype_spellings(fakecuda: FakeCuda) -> None:
    for spelling in ("fp16", "float16", np.float16, np.dtype("f2"), "f2"):
        assert DeviceArray.empty(1, spelling).dtype_token == "fp16"
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert DeviceArray.empty(1, torch.bfloat16).dtype_token == "bf16"
    for wrong in ("halves", object, 3, "complex64"):
        with pytest.raises(TensorError, match="not supported"):
            DeviceArray.empty(1, wrong)


@pytest.mark.parametrize("shape", [-1, (2, -3), 1.5, ("a",), None, (2.0,)])
def test_bad_shape(fakecuda: FakeCuda, shape: object) -> None:
    with pytest.raises(TensorError, match="shape"):
        DeviceArray.empty(shape)  # type: ignore[arg-type]


def test_copy_from(fakecuda: FakeCuda) -> None:
    target = DeviceArray.zeros((2, 3), "int32")
    same = target.copy_from(np.arange(6, dtype=np.int32).reshape(2, 3))
    assert same is target
    other = DeviceArray.empty((2, 3), "int32").copy_from(target)
    np.testing.assert_array_equal(other.to_numpy(), [[0, 1, 2], [3, 4, 5]])
    target[1].copy_from(np.array([7, 8, 9], np.int32))
    np.testing.assert_array_equal(target.to_numpy(), [[0, 1, 2], [7, 8, 9]])
    with pytest.raises(TensorError, match=r"shape \(3,\), expected \(2, 3\)"):
        target.copy_from(np.arange(3, dtype=np.int32))
    with pytest.raises(TensorError, match="dtype float32, expected int32"):
        target.copy_from(np.zeros((2, 3), np.float32))
    with pytest.raises(TensorError, match="contiguous target"):
        target[:, ::2].copy_from(np.zeros((2, 2), np.int32))
    with pytest.raises(TensorError, match="contiguous source"):
        DeviceArray.empty((2, 2), "int32").copy_from(target[:, ::2])
    DeviceArray.empty((0, 3), "int32").copy_from(np.zeros((0, 3), np.int32))


# ---- views ----


@pytest.mark.parametrize(
    "key",
    [
        0,
        -1,
        np.int64(2),
        slice(1, 3),
        slice(None, None, 2),
        slice(3, 1),
        slice(10, 20),
        (slice(None), 2),
        (1, 2, 3),
        (..., 0),
        (0, ...),
        (slice(1, None), ..., slice(0, 4, 3)),
        ...,
        (),
    ],
)
def test_indexing_agrees_with_numpy(fakecuda: FakeCuda, key: object) -> None:
    host = np.arange(4 * 5 * 6, dtype=np.int32).reshape(4, 5, 6)
    view = DeviceArray.from_numpy(host)[key]
    expected = host[key]  # type: ignore[index]
    assert view.shape == expected.shape
    assert view.is_contiguous == bool(np.asarray(expected).flags.c_contiguous)
    np.testing.assert_array_equal(view.to_numpy(), expected)
    assert fakecuda.live_allocations == 1
    del view
    assert fakecuda.live_allocations == 0


@pytest.mark.parametrize("key", [4, -5, (0, 0, 0, 0), slice(None, None, -1), True, 1.0, [0], None])
def test_indexing_refused(fakecuda: FakeCuda, key: object) -> None:
    array = DeviceArray.zeros((4, 5, 6))
    with pytest.raises(IndexError):
        array[key]


def test_reshape_and_view(fakecuda: FakeCuda) -> None:
    host = np.arange(24, dtype=np.int32)
    array = DeviceArray.from_numpy(host)
    for shape in [(4, 6), (-1, 2), (2, 3, 4), (24,), (1, 24)]:
        np.testing.assert_array_equal(array.reshape(shape).to_numpy(), host.reshape(shape))
    np.testing.assert_array_equal(array.reshape(4, -1).to_numpy(), host.reshape(4, 6))
    for dtype in ("int64", "uint8", "fp32", "int16"):
        expected = host.reshape(4, 6).view(dtypes.numpy_dtype(dtypes.of(dtype)))
        view = array.reshape(4, 6).view(dtype)
        assert view.shape == expected.shape
        np.testing.assert_array_equal(view.to_numpy(), expected)
    for bad in [(5, 5), (-1, 5), (-1, -1), (-2, 12)]:
        with pytest.raises(TensorError):
            array.reshape(bad)
    with pytest.raises(TensorError, match="not adjacent"):
        array.reshape(4, 6)[:, ::2].reshape(12)
    with pytest.raises(TensorError, match="multiples of 8 bytes"):
        array.reshape(8, 3).view("int64")
    with pytest.raises(TensorError, match="adjacent elements"):
        array.reshape(4, 6)[:, ::2].view("int64")
    assert len(array.reshape(4, 6)) == 4
    with pytest.raises(TypeError, match="0-dimensional"):
        len(array[0])
    with pytest.raises(TensorError, match="cannot reshape"):
        DeviceArray.empty((0, 3)).reshape(0, -1)
