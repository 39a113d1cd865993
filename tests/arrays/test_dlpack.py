"""DeviceArray to and from other libraries: DLPack and the CUDA array interface."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import make_stream
from in_threads import in_threads

from kernel_hub.arrays import dlpack, dtypes
from kernel_hub.arrays.device_array import DeviceArray
from kernel_hub.arrays.pool import trim
from kernel_hub.errors import TensorError

TOKENS = sorted(dtypes.DTYPES)


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
    trim()
    assert fakecuda.live_allocations == 0  # capsules that nobody consumed gave theirs back


# What C code does that is given a capsule and refuses it: the capsule dies with the error set.
REFUSALS: list[Callable[[Any], object]] = [
    np.from_dlpack,
    lambda array: int(array.__dlpack__()),
    lambda array: [].index(array.__dlpack__()),
    lambda array: {}[array.__dlpack__(max_version=(1, 0))],
]


@pytest.mark.parametrize("place", range(len(REFUSALS)))
def test_a_capsule_that_dies_of_an_error(fakecuda: FakeCuda, place: int) -> None:
    """The error is the one that was raised, and the memory is not lost."""
    for _ in range(3):
        with pytest.raises((BufferError, KeyError, RuntimeError, TypeError, ValueError)):
            REFUSALS[place](DeviceArray.zeros(4))
    gc.collect()
    assert fakecuda.live_allocations <= 1, "the next export gives back what the last left"
    trim()
    assert fakecuda.live_allocations == 0


def test_capsules_in_many_threads(fakecuda: FakeCuda) -> None:
    array = DeviceArray.from_numpy(np.arange(4, dtype=np.int32))

    def work() -> None:
        for turn in range(200):
            capsule = array.__dlpack__()
            if turn % 2:
                view = DeviceArray.from_dlpack(Old(array))
                assert view.ptr == array.ptr
            assert capsule_name(capsule) == "dltensor"

    in_threads(*[work] * 4)
    trim()
    assert not dlpack._exported and not dlpack._given


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
    dlpack.DLManagedTensor.from_address(pointer).tensor.lanes = 4
    with pytest.raises(TensorError, match="4 lanes"):
        DeviceArray.from_dlpack(Given(capsule))
    assert capsule_name(capsule) == "dltensor"  # not taken over
    trim()
    assert fakecuda.live_allocations == 1, "it is not dead"
    del capsule, array
    trim()
    assert fakecuda.live_allocations == 0


def test_dlpack_consumer_in_another_thread(fakecuda: FakeCuda) -> None:
    holder = [DeviceArray.from_dlpack(DeviceArray.zeros(4))]
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert fakecuda.live_allocations == 0
