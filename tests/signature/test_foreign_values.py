"""Values that no entry of the runtime expects: each is taken, or refused by one of our errors."""

from __future__ import annotations

import ctypes
import time
import types
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import BLOCK, GRID, PROBE_CUBIN, arrays, make_stream
from lots import Lots

from kernel_hub import DeviceArray, Kernel, KernelFunction, memory_stats
from kernel_hub.arrays import interop
from kernel_hub.arrays.device_array import trim
from kernel_hub.errors import KernelHubError, LaunchConfigError, ParamsError

UNTYPED = PROBE_CUBIN.read_bytes()


def at(address: Any, **more: Any) -> Any:
    interface = {"shape": (4,), "typestr": "<f4", "data": (address, False), "version": 3, **more}
    return types.SimpleNamespace(__cuda_array_interface__=interface)


VALUES: list[Any] = [
    None, True, -1, 3, 17, 4095, 4096, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**200, -(2**70),
    0.5, float("nan"), 1j, "", "text", b"", b"bytes", bytearray(4), [], (), {}, {1: 2}, set(),
    object(),
    [1], (1, 2), (1, 2, 3, 4), [[1]], "1", np.str_("x"), np.bytes_(b"x"),
    np.datetime64("2020-01-01"),
    np.timedelta64(3, "s"), np.datetime64("NaT"), np.void(b"abcd"), np.int32(-4), np.int64(2**40),
    np.float32(1e30), np.float16(2), np.bool_(True), np.complex64(1j), np.array(3),
    np.array([1, 2]),
    np.array(["a"]), np.array([None], dtype=object), np.zeros(0), np.zeros((2, 2)), np.array(True),
    ctypes.c_int(3), ctypes.c_void_p(None), ctypes.c_void_p(8), ctypes.c_char_p(b"x"),
    ctypes.c_double(1),
    ctypes.pointer(ctypes.c_int(3)), (ctypes.c_int * 2)(), Decimal("1"), Fraction(1, 2), range(3),
    iter([1]), type, int, len, memoryview(b"abcd"), Ellipsis,
    at(-1), at(-(2**70)), at(2**64), at(0x7F0000000000), at(None), at("x"),
    at(0x7F0000000000, stream=-1),
    at(0x7F0000000000, stream=0), at(0x7F0000000000, stream=3), at(0x7F0000000000, stream="x"),
    at(0x7F0000000000, shape=None), at(0x7F0000000000, typestr="?"),
    at(0x7F0000000000, shape=(-4,)),
    types.SimpleNamespace(cuda_stream=-5), types.SimpleNamespace(cuda_stream="x"),
    types.SimpleNamespace(__cuda_stream__=(0, -1)), types.SimpleNamespace(__cuda_stream__=7),
    types.SimpleNamespace(ptr=None), types.SimpleNamespace(handle=12), float, slice(None),
]  # fmt: skip
TAKEN = (KernelHubError, TypeError, IndexError, ValueError, BufferError)


def may_be_stream(value: Any) -> bool:
    """Whether the driver would look for a stream there: no test of ours tells it from one."""
    if isinstance(value, ctypes._SimpleCData):
        value = value.value
    return isinstance(value, (int, np.integer)) and 4096 <= value < 2**63


def good() -> dict[str, Any]:
    return {
        "gridDim": GRID, "blockDim": BLOCK, "sharedMemBytes": 0, "stream": 0,
        "params": [*arrays(), 5, 0.5],
    }  # fmt: skip


ARGUMENTS = (
    *("gridDim", "blockDim", "sharedMemBytes", "stream", "params"),
    *("cluster", "cooperative", "programmatic", "priority", "carveout", "sharedMem"),
)


@pytest.mark.parametrize("way", ["launch", "bind", "bound"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_a_launch(
    fakecuda: FakeCuda, probe: KernelFunction, way: str, name: str
) -> None:
    call: Any = probe if way == "launch" else probe.bind
    for value in VALUES:
        if name == "stream" and may_be_stream(value):
            continue
        given = {**good(), name: value}
        if name == "sharedMem":
            del given["sharedMemBytes"]
        try:
            made = call(**given)
            if way == "bound":
                made()
        except KernelHubError:
            pass
        probe(GRID, BLOCK, 0, 0, good()["params"])


@pytest.mark.parametrize("typed", [True, False])
def test_parameters(fakecuda: FakeCuda, typed: bool) -> None:
    kernel = Kernel("launch_probe") if typed else Kernel(UNTYPED)
    function = kernel.launch_probe_5
    fine = [*arrays(), ctypes.c_int(5), ctypes.c_float(0.5)]
    for value in VALUES:
        for place in range(5):
            params = list(fine)
            params[place] = value
            for call in (function, lambda *a: function.bind(*a)()):
                try:
                    call(GRID, BLOCK, 0, 0, params)
                except (ParamsError, KernelHubError):
                    pass
    function(GRID, BLOCK, 0, 0, fine)


def test_what_once_came_through(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    untyped = Kernel(UNTYPED).launch_probe_5
    x, y, z = arrays()
    for value in (np.str_("x"), np.datetime64("2020-01-01"), np.timedelta64(1, "s")):
        for function in (probe, untyped):
            with pytest.raises(ParamsError, match="no number"):
                function(GRID, BLOCK, 0, 0, [x, y, z, value, ctypes.c_float(1)])
    for array in (at(-1), at(-(2**70)), at(2**64)):
        for call in (probe, probe.bind):
            with pytest.raises(ParamsError, match="no address"):
                call(GRID, BLOCK, 0, 0, [array, y, z, 5, 0.5])
    with pytest.raises(LaunchConfigError, match=r"cooperative=.*True or False"):
        probe(GRID, BLOCK, 0, 0, [x, y, z, 5, 0.5], cooperative=np.zeros(2))
    for stream in (0, 1, 2, make_stream()):
        probe(GRID, BLOCK, 0, stream, [x, y, z, 5, 0.5])
    before = fakecuda.launch_count
    for stream in (-1, 3, 255, 4095, 2**63, 2**64 - 1, 2**64, True, np.int64(-1), np.uint64(7)):
        for call in (probe, probe.bind, probe.bind(GRID, BLOCK, 0, 0, [x, y, z, 5, 0.5])._keep[0]):
            with pytest.raises(LaunchConfigError, match="is no stream"):
                call(GRID, BLOCK, 0, stream, [x, y, z, 5, 0.5])
        with pytest.raises(LaunchConfigError, match="is no stream"):
            interop.stream_handle(stream, 0)
        with pytest.raises(LaunchConfigError, match="is no stream"):
            DeviceArray.zeros(4, stream=stream)
    assert fakecuda.launch_count == before


CALLS: dict[str, Callable[[Any], Any]] = {
    "empty shape": lambda v: DeviceArray.empty(v),
    "empty dtype": lambda v: DeviceArray.empty(4, v),
    "empty device": lambda v: DeviceArray.empty(4, device=v),
    "empty stream": lambda v: DeviceArray.empty(4, stream=v),
    "from_numpy": lambda v: DeviceArray.from_numpy(v),
    "from_dlpack": lambda v: DeviceArray.from_dlpack(v),
    "index": lambda v: DeviceArray.zeros((4, 4))[v],
    "reshape": lambda v: DeviceArray.zeros((4, 4)).reshape(v),
    "view": lambda v: DeviceArray.zeros((4, 4)).view(v),
    "copy_from": lambda v: DeviceArray.zeros((2, 2)).copy_from(v),
    "to_numpy stream": lambda v: DeviceArray.zeros((2, 2)).to_numpy(stream=v),
    "stats": memory_stats,
    "trim": trim,
    "trim keep": lambda v: trim(keep_bytes=v),
    "load": lambda v: Kernel("launch_probe").launch_probe_5.load(v),
    "kernel load": lambda v: Kernel("launch_probe").load(v),
    "image": lambda v: Kernel("launch_probe").image(v),
    "occupancy": lambda v: Kernel("launch_probe").launch_probe_5.occupancy(v),
    "attributes": lambda v: Kernel("launch_probe").launch_probe_5.attributes(v),
    "global": lambda v: Kernel("launch_probe").get_global(v),
    "filename": lambda v: Kernel(v),
    "names": lambda v: Kernel("launch_probe", v),
    "package": lambda v: Kernel("launch_probe", package=v),
    "signatures": lambda v: Kernel(UNTYPED, signatures=v),
    "keep": lambda v: Kernel("launch_probe", keep=v),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_other_entry(fakecuda: FakeCuda, name: str) -> None:
    """Ours, or Python's own for a value of the wrong kind; never AttributeError or the like."""
    wrong = []
    for value in VALUES:
        if "stream" in name and may_be_stream(value):
            continue
        try:
            CALLS[name](value)
        except TAKEN:
            pass
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{value!r}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def ptx(number: int) -> str:
    entries = "".join(
        f".visible .entry _Z4kern{n}ILi{n}EEvPf(.param .u64 out) {{ ret; }}\n"
        for n in range(number)
    )
    return f".version 8.0\n.target sm_80\n.address_size 64\n{entries}"


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def test_many_functions_take_their_number_of_times(fakecuda: FakeCuda) -> None:
    """A Kernel of 100,000 functions looked through all of them for each."""
    lots = Lots("many")
    few, many = ptx(500), ptx(8000)
    names = {len(text): list(Kernel(text).function_names) for text in (few, many)}
    asked = {size: lots.sample(found, len(found)) for size, found in names.items()}

    def use(text: str) -> None:
        kernel = Kernel(text, asked[len(text)])
        for name in asked[len(text)]:
            assert name in kernel
            kernel._symbol(name)

    least = [min(seconds(partial(use, text)) for _ in range(3)) for text in (few, many)]
    ratio = least[1] / least[0]
    assert ratio < 16 * 6, f"{ratio:.0f} times the time for 16 times the functions: {lots}"
