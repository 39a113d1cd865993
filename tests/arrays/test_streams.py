"""Stream, Event and synchronize, and that everything with a stream= takes them."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import BLOCK, GRID, arrays

from kernel_hub import DeviceArray, Event, KernelFunction, Stream, driver, synchronize
from kernel_hub.errors import CudaDriverError, LaunchConfigError, TensorError


def test_a_stream_goes_wherever_one_is_asked_for(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    with Stream() as stream:
        assert fakecuda.live("streams") == 1
        x, y = arrays(2)
        made = DeviceArray.from_numpy(np.ones(1024, np.float32), stream=stream)
        params = (made, x, y, 1024, 2.0)
        probe(GRID, BLOCK, 0, stream, params)
        assert fakecuda.launch().stream == stream.handle
        probe.bind(GRID, BLOCK, 0, stream, params)()
        assert fakecuda.launch().stream == stream.handle
        assert made.to_numpy(stream).shape == (1024,)
        made.copy_from(x, stream=stream)
        assert DeviceArray.from_dlpack(x, stream=stream).ptr == x.ptr
    with pytest.raises(LaunchConfigError, match="this Stream was closed"):
        probe(GRID, BLOCK, 0, stream, params)
    handle = stream._cell.value
    made.free()
    assert fakecuda.last_free_stream == handle, "memory of a closed stream is freed on it"
    del stream, made, params
    gc.collect()
    assert fakecuda.live("streams") == 0


def test_events_order_streams_and_take_times(fakecuda: FakeCuda) -> None:
    with Stream() as one, Stream(blocking=True) as other:
        before, after = Event(timing=True), Event(timing=True)
        before.record(one)
        assert one.record(after) is after
        other.wait(after)
        other.wait(one)
        assert after.elapsed_ms(before) == 1.0
        assert after.is_done and one.is_done and other.is_done
        after.record()
        after.synchronize()
        assert repr(one) == f"Stream(device=0, handle={one.handle:#x})"
        with pytest.raises(LaunchConfigError, match=r"takes no time: make it with Event\(timing"):
            after.elapsed_ms(one.record())
    assert repr(one) == "Stream(device=0, closed)"
    one.close()
    del before, after, one, other
    gc.collect()
    assert (fakecuda.live("streams"), fakecuda.live("events")) == (0, 0)


def test_streams_of_several_devices(make_fakecuda: Callable[..., FakeCuda]) -> None:
    make_fakecuda(devices=2)
    with Stream("cuda:1") as stream:
        assert stream.device == stream.device_id == 1
        assert DeviceArray.zeros(4, device=1, stream=stream).device == 1
        with pytest.raises(LaunchConfigError, match="stream belongs to device 1"):
            DeviceArray.zeros(4, device=0, stream=stream)
        with pytest.raises(LaunchConfigError, match="stream belongs to device 1"):
            Event(0).record(stream)
    synchronize(1)
    with pytest.raises(TensorError, match="a number, 'cuda:0'"):
        Stream("cpu")
    with pytest.raises(CudaDriverError, match="asked for device 2"):
        synchronize(2)


def test_what_fails_is_said(fakecuda: FakeCuda) -> None:
    stream, event = Stream(), Event()
    fakecuda.fail("cuStreamSynchronize", 700)
    with pytest.raises(CudaDriverError, match=r"waiting for Stream\(device=0"):
        stream.synchronize()
    fakecuda.fail("cuEventQuery", 600)
    assert not event.is_done
    fakecuda.fail("cuStreamQuery", 700)
    with pytest.raises(CudaDriverError, match=r"asking about Stream\(device=0"):
        _ = stream.is_done
    fakecuda.fail("cuCtxSynchronize", 700)
    with pytest.raises(CudaDriverError, match="waiting for device 0"):
        synchronize()
    fakecuda.fail("cuStreamCreate", 2)
    with pytest.raises(CudaDriverError, match="making a stream on device 0"):
        Stream()
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(stream)


def test_the_callers_context_stays(fakecuda: FakeCuda) -> None:
    before = driver.get().current_context()
    with Stream() as stream:
        stream.record().synchronize()
        synchronize()
    assert driver.get().current_context() == before


def test_a_stream_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(driver.LIBRARY_VARIABLE, "/nowhere/libcuda.so.1")
    monkeypatch.setattr(driver.library, "_driver", None)
    with pytest.raises(ImportError, match=r"/nowhere/libcuda\.so\.1"):
        Stream()
