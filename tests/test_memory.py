"""DeviceArray on the stand-in driver: copies, views, life and death of memory, every failure."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import pickle
import subprocess
import sys
import threading
import warnings
from ctypes import byref, c_void_p
from pathlib import Path

import numpy as np
import pytest
from fakecuda import FakeCuda

from kernel_hub import _dtypes, _pool, driver, tensors
from kernel_hub.errors import CudaDriverError, DeviceOutOfMemoryError, TensorError
from kernel_hub.memory import DeviceArray, memory_stats, trim

ROOT = Path(__file__).resolve().parent.parent
TOKENS = sorted(_dtypes.DTYPES)


def make_stream(device: int = 0) -> int:
    handle = c_void_p()
    drv = driver.get()
    with drv.on_device(device):
        drv.call("cuStreamCreate", byref(handle), 1)
    return handle.value or 0


# ---- copies ----


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
    assert array.size_bytes == 24 * _dtypes.DTYPES[token].size_bytes
    assert array.to_numpy().tobytes() == bytes(array.size_bytes)
    described = tensors.describe(array)
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
        "from kernel_hub.memory import DeviceArray\n"
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
        expected = host.reshape(4, 6).view(_dtypes.numpy_dtype(_dtypes.of(dtype)))
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


# ---- life ----


def test_views_keep_the_memory(fakecuda: FakeCuda) -> None:
    array = DeviceArray.from_numpy(np.arange(8, dtype=np.float32))
    view = array[2:].reshape(2, 3)[1]
    del array
    gc.collect()
    assert fakecuda.live_allocations == 1
    np.testing.assert_array_equal(view.to_numpy(), [5, 6, 7])
    del view
    assert fakecuda.live_allocations == 0


def test_use_after_free_is_refused(fakecuda: FakeCuda) -> None:
    array = DeviceArray.zeros((4, 4))
    view = array[1:]
    assert not array.is_freed
    view.free()
    assert array.is_freed
    assert fakecuda.live_allocations == 0
    array.free()  # a second time does nothing
    assert fakecuda.calls("cuMemFreeAsync") == 1
    uses = [
        lambda: array.ptr,
        array.to_numpy,
        lambda: array[0],
        lambda: array.reshape(16),
        lambda: array.view("int32"),
        lambda: array.copy_from(np.zeros((4, 4), np.float32)),
        lambda: array.__cuda_array_interface__,
        lambda: array.__dlpack__(),
        lambda: DeviceArray.zeros((4, 4)).copy_from(array),
        lambda: tensors.describe(array),
    ]
    for use in uses:
        with pytest.raises(TensorError, match="freed"):
            use()
    assert "freed" in repr(array)
    assert fakecuda.calls("cuMemFreeAsync") == 2  # the last line's own array


def test_freed_on_its_stream(fakecuda: FakeCuda) -> None:
    stream = make_stream()
    array = DeviceArray.zeros(16, stream=stream)
    array._record_use(stream)
    del array
    assert fakecuda.last_free_stream == stream
    assert fakecuda.calls("cuCtxSynchronize") == 0
    DeviceArray.zeros(16, stream=1).free()  # the other name of the legacy stream
    assert fakecuda.last_free_stream == 0


def test_use_on_another_stream_is_waited_for(fakecuda: FakeCuda) -> None:
    stream = make_stream()
    array = DeviceArray.zeros(16)
    array._record_use(0)
    array._record_use(1)
    array[4:]._record_use(stream)
    assert array.__cuda_array_interface__["stream"] == stream
    assert fakecuda.calls("cuCtxSynchronize") == 0
    array.to_numpy()
    assert fakecuda.calls("cuCtxSynchronize") == 1
    array.to_numpy()
    assert fakecuda.calls("cuCtxSynchronize") == 1  # waited already
    array._record_use(stream)
    del array
    assert fakecuda.calls("cuCtxSynchronize") == 2
    assert fakecuda.last_free_stream == 0
    assert fakecuda.live_allocations == 0


def test_stream_objects_live_as_long_as_the_memory(fakecuda: FakeCuda) -> None:
    class Stream:
        def __init__(self) -> None:
            self.cuda_stream = make_stream()

        def __del__(self) -> None:
            driver.get().try_call("cuStreamDestroy_v2", self.cuda_stream)

    array = DeviceArray.zeros(16, stream=Stream())
    gc.collect()
    assert fakecuda.live("streams") == 1
    del array
    assert fakecuda.live_allocations == 0
    assert fakecuda.live("streams") == 0


def test_no_free_while_the_stream_captures(fakecuda: FakeCuda) -> None:
    stream = make_stream()
    one, two = (DeviceArray.zeros(16, stream=stream) for _ in range(2))
    other = DeviceArray.zeros(16)
    fakecuda.set_capture(stream)
    del one
    two.free()
    other.free()  # the legacy stream would end the capture
    assert fakecuda.calls("cuMemFreeAsync") == 0
    assert memory_stats().pending_frees == 3
    fakecuda.set_capture(stream, 0)
    assert memory_stats().pending_frees == 0
    assert fakecuda.live_allocations == 0
    assert fakecuda.calls("cuMemFreeAsync") == 3


def test_no_allocation_while_the_stream_captures(fakecuda: FakeCuda) -> None:
    stream = make_stream()
    fakecuda.set_capture(stream)
    for on in (stream, None):
        with pytest.raises(CudaDriverError, match="allocate before the capture begins"):
            DeviceArray.empty(16, stream=on)
    fakecuda.set_capture(stream, 0)
    DeviceArray.empty(16, stream=stream)


def test_from_address_keeps_the_owner_and_frees_nothing(fakecuda: FakeCuda) -> None:
    base = DeviceArray.from_numpy(np.arange(4, dtype=np.float32))
    view = DeviceArray.from_address(base.ptr, 4, "fp32", 0, base)
    del base
    assert fakecuda.live_allocations == 1
    np.testing.assert_array_equal(view.to_numpy(), [0, 1, 2, 3])
    view.free()
    assert view.is_freed
    assert fakecuda.live_allocations == 0


def test_not_copied_or_pickled_as_an_address(fakecuda: FakeCuda) -> None:
    array = DeviceArray.zeros(4)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="to_numpy"):
            attempt(array)
    with pytest.raises(TypeError, match="to_numpy"):
        np.asarray(array)


def test_thousand_cycles_do_not_grow(fakecuda: FakeCuda) -> None:
    DeviceArray.empty(1024).free()
    before = memory_stats()
    for _ in range(1000):
        array = DeviceArray.empty((32, 32))
        array[3].reshape(4, 8)
        del array
    after = memory_stats()
    assert after == before
    assert after.live_arrays == after.used_bytes == 0
    assert fakecuda.live_allocations == 0
    assert fakecuda.live("pools") == 1
    assert fakecuda.context_depth == 0


def test_threads(fakecuda: FakeCuda) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            kept = []
            for step in range(200):
                host = np.full(64, seed * 1000 + step, np.int32)
                array = DeviceArray.from_numpy(host)
                np.testing.assert_array_equal(array.to_numpy(), host)
                kept.append(array)
                if step % 3 == 0:
                    kept.clear()
                if step % 5 == 0:
                    array.free()
                    array.free()
            memory_stats()
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert fakecuda.live_allocations == 0
    assert fakecuda.live("pools") == 1
    assert memory_stats().live_arrays == 0


def test_two_threads_free_one_array(fakecuda: FakeCuda) -> None:
    for _ in range(50):
        array = DeviceArray.empty(8)
        threads = [threading.Thread(target=array.free) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert fakecuda.calls("cuMemFreeAsync") == 50


def test_devices(make_fakecuda: object) -> None:
    fake: FakeCuda = make_fakecuda(devices=2)  # type: ignore[operator]
    zero, one = (DeviceArray.zeros(256, device=device) for device in (0, 1))
    assert (zero.device, one.device) == (0, 1)
    assert fake.live("pools") == 2
    assert memory_stats(1).live_arrays == 1
    assert memory_stats(1).used_bytes == 1024
    np.testing.assert_array_equal(one.to_numpy(), np.zeros(256))
    assert one.__dlpack_device__() == (2, 1)
    with pytest.raises(TensorError, match="device 0"):
        zero.copy_from(one)
    del one
    assert memory_stats(1).live_arrays == 0
    with pytest.raises(CudaDriverError, match="asked for device 2; there are 2"):
        DeviceArray.empty(1, device=2)


# ---- statistics, trimming, running out ----


def test_stats_and_trim(fakecuda: FakeCuda) -> None:
    fresh = memory_stats()
    assert (fresh.reserved_bytes, fresh.live_arrays) == (0, 0)
    assert fakecuda.live("pools") == 0
    array = DeviceArray.empty(40 << 20, "uint8")
    stats = memory_stats(0)
    assert stats.used_bytes == 40 << 20
    assert stats.reserved_bytes == stats.reserved_high_bytes == 64 << 20
    assert stats.free_device_bytes == fresh.free_device_bytes - (64 << 20)
    assert stats.live_arrays == 1
    del array
    kept = memory_stats()
    assert kept.reserved_bytes == 64 << 20  # kept for reuse
    trim(keep_bytes=32 << 20)
    assert memory_stats().reserved_bytes == 32 << 20
    trim()
    assert memory_stats().reserved_bytes == 0
    assert memory_stats().used_high_bytes == 40 << 20
    with pytest.raises(TensorError, match="keep_bytes"):
        trim(keep_bytes=-1)


def test_out_of_memory_says_the_figures(fakecuda: FakeCuda) -> None:
    fakecuda.set_total_memory(0, 100 << 20)
    kept = DeviceArray.empty(10 << 20, "uint8")
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        DeviceArray.empty((200, 1 << 20), "uint8")
    text = str(caught.value)
    for part in (
        "asked for 209,715,200 bytes for shape (200, 1048576) of uint8",
        "71,303,168 of 104,857,600 bytes free",
        "pool holds 33,554,432 bytes, 10,485,760 of them in 1 live arrays",
        "torch.cuda.empty_cache()",
    ):
        assert part in text
    assert isinstance(caught.value, MemoryError)
    assert caught.value.code == 2
    assert fakecuda.live_allocations == 1
    kept.to_numpy()
    DeviceArray.empty(10 << 20, "uint8")


def test_out_of_memory_reclaims_first(fakecuda: FakeCuda) -> None:
    fakecuda.set_total_memory(0, 100 << 20)
    # A dead cycle holds 60 MiB, and the pool would hold on to what it has.
    cycle: list[object] = [DeviceArray.empty(60 << 20, "uint8")]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert fakecuda.live_allocations == 1
        DeviceArray.empty(90 << 20, "uint8")
    finally:
        gc.enable()
    assert fakecuda.live_allocations == 0
    assert fakecuda.calls("cuMemPoolTrimTo") == 1


def test_device_without_pools(make_fakecuda: object) -> None:
    fake: FakeCuda = make_fakecuda()  # type: ignore[operator]
    fake.set_device_attribute(0, driver.MEMORY_POOLS_SUPPORTED, 0)
    with pytest.raises(CudaDriverError, match="no stream-ordered memory pools"):
        DeviceArray.empty(1)
    DeviceArray.empty(0)  # needs no memory


# ---- every call failing with every error ----

CALLS = [
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuMemPoolCreate",
    "cuMemPoolSetAttribute",
    "cuMemAllocFromPoolAsync",
    "cuMemsetD8Async",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamSynchronize",
    "cuMemGetInfo_v2",
    "cuMemPoolGetAttribute",
    "cuMemPoolTrimTo",
]


def use_everything() -> None:
    array = DeviceArray.from_numpy(np.arange(32, dtype=np.float32))
    zeros = DeviceArray.zeros(32)
    zeros.copy_from(array)
    np.testing.assert_array_equal(zeros.to_numpy(), np.arange(32))
    memory_stats()
    trim()


@pytest.mark.parametrize("code", sorted(driver.RESULTS))
@pytest.mark.parametrize("call", CALLS)
def test_each_call_failing(fakecuda: FakeCuda, call: str, code: int) -> None:
    driver.get()
    # Out of memory is tried twice where trimming can help.
    fakecuda.fail(call, code, count=2 if (call, code) == ("cuMemAllocFromPoolAsync", 2) else 1)
    with pytest.raises(CudaDriverError) as caught:
        use_everything()
    error = caught.value
    assert error.code == code
    assert error.call == call
    name, meaning = driver.RESULTS[code]
    assert error.name == name
    assert meaning in str(error)
    assert isinstance(error, DeviceOutOfMemoryError) == (code == 2)
    assert ("sticky" in str(error)) == (code in driver.STICKY)
    del caught, error
    gc.collect()
    fakecuda.clear_faults()
    assert fakecuda.live_allocations == 0
    assert fakecuda.context_depth == 0
    use_everything()
    assert fakecuda.live_allocations == 0
    assert fakecuda.live("pools") == 1


@pytest.mark.parametrize("code", sorted(set(driver.RESULTS) - {900, 901, 906}))
def test_free_failing(fakecuda: FakeCuda, code: int) -> None:
    array = DeviceArray.zeros(4)
    fakecuda.fail("cuMemFreeAsync", code)
    with pytest.raises(CudaDriverError, match="freeing 16 bytes at") as caught:
        array.free()
    assert caught.value.code == code
    assert array.is_freed
    assert memory_stats().live_arrays == 0
    use_everything()


def test_finaliser_failing_is_shown_unless_the_context_is_lost(fakecuda: FakeCuda) -> None:
    seen = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda info: seen.append(str(info.exc_value))
    try:
        for code in (4, 201, 700, 719, 1):
            array = DeviceArray.zeros(4)
            fakecuda.fail("cuMemFreeAsync", code)
            del array
    finally:
        sys.unraisablehook = hook
    assert len(seen) == 1
    assert "cuMemFreeAsync failed: CUDA_ERROR_INVALID_VALUE" in seen[0]


def test_lost_context_is_quiet_at_the_end_and_said_in_use(fakecuda: FakeCuda) -> None:
    array = DeviceArray.zeros(4)
    fakecuda.set_sticky(700)
    with pytest.raises(CudaDriverError, match="a kernel that ran earlier caused it"):
        array.to_numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del array


# ---- interchange ----


def test_cuda_array_interface(fakecuda: FakeCuda) -> None:
    array = DeviceArray.zeros((4, 6), "fp16")
    interface = array.__cuda_array_interface__
    assert interface == {
        "shape": (4, 6),
        "typestr": "<f2",
        "data": (array.ptr, False),
        "version": 3,
        "strides": None,
        "stream": 1,
    }
    view = array[:, 1:3].__cuda_array_interface__
    assert view["strides"] == (12, 2)
    assert view["data"][0] == array.ptr + 2
    assert DeviceArray.zeros(2, "bf16").__cuda_array_interface__["typestr"] == "<u2"
    assert DeviceArray.zeros((0, 2)).__cuda_array_interface__["data"] == (0, False)


@pytest.mark.parametrize("token", TOKENS)
def test_dlpack_round_trip(fakecuda: FakeCuda, token: str) -> None:
    array = DeviceArray.zeros((4, 6), token)
    array.copy_from(np.arange(24).reshape(4, 6).astype(array.dtype))
    view = DeviceArray.from_dlpack(array[1:, ::2])
    assert view.dtype_token == token
    assert (view.shape, view.strides, view.ptr) == ((3, 3), (6, 2), array[1].ptr)
    expected = array.to_numpy()[1:, ::2]
    del array
    gc.collect()
    assert fakecuda.live_allocations == 1
    assert view.to_numpy().tobytes() == expected.tobytes()
    del view
    gc.collect()
    assert fakecuda.live_allocations == 0


class Old:
    """A producer from before DLPack 1.0."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, stream: int | None = None) -> object:
        assert stream != 0
        return self.array.__dlpack__(stream=stream)


def capsule_name(capsule: object) -> str:
    return repr(capsule).split('"')[1]


def test_dlpack_versions(fakecuda: FakeCuda) -> None:
    array = DeviceArray.from_numpy(np.arange(4, dtype=np.int32))
    assert capsule_name(array.__dlpack__()) == "dltensor"
    assert capsule_name(array.__dlpack__(max_version=(0, 8))) == "dltensor"
    assert capsule_name(array.__dlpack__(max_version=(1, 1))) == "dltensor_versioned"
    view = DeviceArray.from_dlpack(Old(array))
    assert not view.read_only
    del array
    np.testing.assert_array_equal(view.to_numpy(), np.arange(4))
    del view
    gc.collect()
    assert fakecuda.live_allocations == 0  # capsules that nobody consumed gave theirs back


def test_dlpack_arguments(fakecuda: FakeCuda) -> None:
    array = DeviceArray.zeros(4)
    assert array.__dlpack_device__() == (2, 0)
    array.__dlpack__(stream=-1, dl_device=(2, 0), copy=False)
    for wrong in ({"dl_device": (1, 0)}, {"copy": True}):
        with pytest.raises(BufferError):
            array.__dlpack__(**wrong)
    with pytest.raises(ValueError, match="stream=0"):
        array.__dlpack__(stream=0)
    array.read_only = True
    with pytest.raises(BufferError, match="read-only"):
        array.__dlpack__()
    view = DeviceArray.from_dlpack(array)
    assert view.read_only
    assert view[1:].__cuda_array_interface__["data"][1]
    with pytest.raises(TensorError, match="read-only"):
        view.copy_from(np.zeros(4, np.float32))


def test_dlpack_orders_streams(fakecuda: FakeCuda) -> None:
    stream = make_stream()
    array = DeviceArray.zeros(4)
    array.__dlpack__(stream=1)
    array.__dlpack__(stream=-1)
    assert fakecuda.calls("cuCtxSynchronize") == 0
    array.__dlpack__(stream=stream)
    assert fakecuda.calls("cuCtxSynchronize") == 1
    array.free()
    assert fakecuda.calls("cuCtxSynchronize") == 2  # the consumer's stream is not the array's


def test_dlpack_refusals(fakecuda: FakeCuda) -> None:
    with pytest.raises(TensorError, match="device type 1"):
        DeviceArray.from_dlpack(np.zeros(4))
    with pytest.raises(TensorError, match="has no __dlpack__"):
        DeviceArray.from_dlpack([1, 2])

    class Used(Old):
        def __dlpack__(self, stream: int | None = None) -> object:
            capsule = self.array.__dlpack__(stream=stream)
            DeviceArray.from_dlpack(Given(capsule))
            return capsule

    class Given:
        def __init__(self, capsule: object) -> None:
            self.capsule = capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, **_: object) -> object:
            return self.capsule

    array = DeviceArray.zeros(4)
    with pytest.raises(TensorError, match="no unused DLPack capsule"):
        DeviceArray.from_dlpack(Used(array))
    capsule = array.__dlpack__()
    pointer = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )(capsule, b"dltensor")
    from kernel_hub import dlpack

    dlpack.DLManagedTensor.from_address(pointer).tensor.lanes = 4
    with pytest.raises(TensorError, match="4 lanes"):
        DeviceArray.from_dlpack(Given(capsule))
    assert capsule_name(capsule) == "dltensor"  # not taken over
    del capsule, array
    gc.collect()
    assert fakecuda.live_allocations == 0


def test_dlpack_consumer_in_another_thread(fakecuda: FakeCuda) -> None:
    holder = [DeviceArray.from_dlpack(DeviceArray.zeros(4))]
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert fakecuda.live_allocations == 0


# ---- processes ----


def run_child(fake: FakeCuda, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, driver.LIBRARY_VARIABLE: fake.path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "hold",
    [
        "pass",
        "import sys; sys.kept = array",
        "cycle = [array]; cycle.append(cycle)",
        "import atexit; atexit.register(lambda: array.to_numpy())",
        "import atexit; atexit.register(lambda: array.free())",
        "capsule = array.__dlpack__(max_version=(1, 0))",
        "import sys; sys.kept = DeviceArray.from_dlpack(array)",
        "import threading; t = threading.local(); t.array = array",
        "array._record_use(2)",
    ],
)
def test_exit_is_quiet(fakecuda: FakeCuda, hold: str) -> None:
    done = run_child(
        fakecuda,
        "from kernel_hub.memory import DeviceArray\n"
        f"array = DeviceArray.zeros((4, 4))\n{hold}\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_dlpack_consumer_outlives_the_interpreter(fakecuda: FakeCuda) -> None:
    # What a C++ static does: it calls the deleter after Python is gone.
    done = run_child(
        fakecuda,
        "import ctypes\n"
        "from kernel_hub import dlpack\n"
        "from kernel_hub.memory import DeviceArray\n"
        "array = DeviceArray.zeros((4, 4))\n"
        "capsule = array.__dlpack__()\n"
        "where = next(iter(dlpack._exported))\n"
        "held = ctypes.py_object(capsule)\n"
        "ctypes.pythonapi.Py_IncRef(held)\n"
        "import atexit\n"
        "def look():\n"
        "    managed = dlpack.DLManagedTensor.from_address(where)\n"
        "    dlpack._DELETER(managed.deleter)(where)\n"
        "    print(where in dlpack._exported)\n"
        "atexit._clear()\n"
        "atexit.register(look)\n"
        "atexit.register(dlpack._disarm)\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork(fakecuda: FakeCuda) -> None:
    done = run_child(
        fakecuda,
        "import os, sys, warnings\n"
        "from kernel_hub.memory import DeviceArray, memory_stats\n"
        "array = DeviceArray.zeros((4, 4))\n"
        "warnings.simplefilter('ignore')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for use in (array.to_numpy, array.free, memory_stats, lambda: DeviceArray.zeros(4)):\n"
        "        try:\n"
        "            use()\n"
        "        except RuntimeError as error:\n"
        "            assert 'forked' in str(error) and 'spawn' in str(error), error\n"
        "        else:\n"
        "            print('no error')\n"
        "    del array\n"
        "    sys.exit(7)\n"
        "_, status = os.waitpid(child, 0)\n"
        "assert os.waitstatus_to_exitcode(status) == 7, status\n"
        "array.to_numpy()\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_reset_forgets_pending(fakecuda: FakeCuda) -> None:
    stream = make_stream()
    array = DeviceArray.zeros(4, stream=stream)
    fakecuda.set_capture(stream)
    del array
    assert len(_pool._pending) == 1
    _pool._reset_for_tests()
    assert not _pool._pending
    assert fakecuda.calls("cuMemFreeAsync") == 0
