"""DeviceArray when driver calls fail, at interpreter exit and after a fork."""

from __future__ import annotations

import gc
import os
import sys
import warnings

import numpy as np
import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import check_fork, make_stream, run_child

from kernel_hub import driver
from kernel_hub.arrays import block, pool
from kernel_hub.arrays.device_array import DeviceArray, memory_stats, trim
from kernel_hub.driver.cuda_results import RESULTS, STICKY
from kernel_hub.errors import CudaDriverError, DeviceOutOfMemoryError

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


@pytest.mark.parametrize("code", sorted(RESULTS))
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
    name, meaning = RESULTS[code]
    assert error.name == name
    assert meaning in str(error)
    assert isinstance(error, DeviceOutOfMemoryError) == (code == 2)
    assert ("sticky" in str(error)) == (code in STICKY)
    del caught, error
    gc.collect()
    fakecuda.clear_faults()
    assert fakecuda.live_allocations == 0
    assert fakecuda.context_depth == 0
    use_everything()
    assert fakecuda.live_allocations == 0
    assert fakecuda.live("pools") == 1


@pytest.mark.parametrize("code", sorted(set(RESULTS) - {900, 901, 906}))
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


# ---- processes ----


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
        f"from kernel_hub import DeviceArray\narray = DeviceArray.zeros((4, 4))\n{hold}\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_dlpack_consumer_outlives_the_interpreter(fakecuda: FakeCuda) -> None:
    # What a C++ static does: it calls the deleter after Python is gone.
    done = run_child(
        fakecuda,
        "import ctypes\n"
        "from kernel_hub.arrays import dlpack\n"
        "from kernel_hub.arrays.device_array import DeviceArray\n"
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
    check_fork(
        fakecuda,
        "array = DeviceArray.zeros((4, 4))",
        "array.to_numpy, array.free, memory_stats, lambda: DeviceArray.zeros(4)",
        "array.to_numpy()",
    )


def test_reset_forgets_pending(fakecuda: FakeCuda) -> None:
    stream = make_stream()
    array = DeviceArray.zeros(4, stream=stream)
    fakecuda.set_capture(stream)
    del array
    assert len(block.pending) == 1
    pool._reset_for_tests()
    assert not block.pending
    assert fakecuda.calls("cuMemFreeAsync") == 0
