"""Order between streams: a launch comes after what other libraries still do to its arrays."""

from __future__ import annotations

from ctypes import byref, c_void_p

from . import Driver

_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class Order:
    """What `Param.convert` calls for arrays of other libraries, with (device, stream, producer).

    producer: the stream that the array's own library names in `__cuda_array_interface__`, which
    `stream` is made to wait for; None: the producer will do so itself (DLPack). Returns the stream
    to tell it, -1 where nothing may wait: a graph capture is no place for the outside's events.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __call__(self, device: int, stream: int, producer: int | None) -> int:
        driver = self._driver
        # 1 names the legacy default stream too.
        stream, producer = 0 if stream == 1 else stream, 0 if producer == 1 else producer
        # No capture is on the legacy default stream, and a launch there fails while one goes on.
        if stream == producer or (stream == 0 and producer is None):
            return stream
        if driver.is_capturing(stream, device):
            return -1
        if producer is not None and not driver.is_capturing(producer, device):
            self._wait(device, stream, producer)
        return stream

    def _wait(self, device: int, stream: int, producer: int) -> None:
        driver = self._driver
        asked = f"making stream {stream:#x} wait for an array's own stream {producer:#x}"
        event = c_void_p()
        failed, code = driver.within(
            device,
            ("cuEventCreate", byref(event), _NO_TIMING),
            ("cuEventRecord", event, producer),
            ("cuStreamWaitEvent", stream, event, 0),
            ("cuEventDestroy_v2", event),
            relaxed=False,
        )
        if code:
            error = driver.error(failed, code, asked)
            if event.value and failed != "cuEventDestroy_v2":
                driver.try_call("cuEventDestroy_v2", event)
            raise error
