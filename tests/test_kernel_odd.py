"""Odd arguments of Kernel and its functions: accepted where they mean something, else refused."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import BLOCK, GRID, PROBE_CUBIN, arrays

from kernel_hub import Kernel, KernelFunction
from kernel_hub.errors import (
    CubinNotFoundError,
    FunctionNotFoundError,
    LaunchConfigError,
    ParamsError,
)


@pytest.fixture
def probe(fakecuda: FakeCuda) -> KernelFunction:
    return Kernel("launch_probe").launch_probe_5


class Malformed:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (2,)}


def test_zero_is_a_priority_and_a_carveout(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    params = [None, None, None, 1, 0.5]
    probe(1, 1, 0, None, params, priority=0, carveout=0)
    assert fakecuda.launch().attributes.keys() == {8, 14}
    probe(2, 1, 0, None, params, cluster=np.array([2, 1, 1]))
    assert fakecuda.launch().attributes.keys() == {4}
    wrong: list[dict[str, Any]] = [
        {"cluster": 0}, {"cluster": 2.0}, {"cluster": [[1], 2]}, {"priority": 2**40},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(LaunchConfigError):
            probe(2, 1, 0, None, params, **options)


@pytest.mark.parametrize("devices", [1, 2])
def test_odd_arguments_are_refused_in_words(
    make_fakecuda: Callable[..., FakeCuda], devices: int
) -> None:
    fake = make_fakecuda(devices=devices)
    probe = Kernel("launch_probe").launch_probe_5
    for params in (
        5,
        {"a", "b"},
        [None, None, None, 1, 10**400],
        [Malformed(), None, None, 1, 0.5],
    ):
        with pytest.raises(ParamsError):
            probe(1, 1, 0, None, params)
        with pytest.raises(ParamsError):
            probe.bind(1, 1, 0, None, params)
    assert fake.launch_count == 0
    probe(1, 1, 0, None, iter([None, None, None, 1, 0.5]))
    for stream in (True, type("S", (), {"__cuda_stream__": lambda self: 7})()):
        with pytest.raises(LaunchConfigError, match="no stream"):
            probe(1, 1, 0, stream, [None, None, None, 1, 0.5])
    for grid in (b"ab", {1: 2}, "1"):
        with pytest.raises(LaunchConfigError):
            probe(grid, 1, 0, None, [None, None, None, 1, 0.5])


def test_odd_names_paths_and_signatures() -> None:
    with pytest.raises(FunctionNotFoundError):
        Kernel("launch_probe", [3])  # type: ignore[list-item]
    with pytest.raises(CubinNotFoundError, match="null"):
        Kernel(Path("a\0b.cubin"))
    with pytest.raises(ParamsError, match="signatures is a str"):
        Kernel(PROBE_CUBIN, signatures="float*")  # type: ignore[arg-type]
    text = "void launch_probe_5(float* out, float* x, float* y, int n, float scale);"
    declared = Kernel(PROBE_CUBIN, signatures={"launch_probe_5": text}).launch_probe_5
    assert declared.signature == text[5:-1]


def test_a_mangled_name_is_an_attribute() -> None:
    image = PROBE_CUBIN.read_bytes().replace(b"launch_probe_5", b"_Zaunch_probe5")
    kernel = Kernel(image)
    assert "_Zaunch_probe5" in dir(kernel)
    assert kernel._Zaunch_probe5 is kernel["_Zaunch_probe5"]


def test_unload_waits_for_loads_of_other_functions(fakecuda: FakeCuda) -> None:
    """A function's first load and an unload take their locks in one order."""
    kernel = Kernel("launch_probe")
    fakecuda.set_latency("cuLibraryLoadData", 200_000)
    jobs = (kernel.launch_probe_12.load, kernel.unload, kernel.launch_probe_5.load)
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_bound_launch_is_refused_once_its_image_is_unloaded(fakecuda: FakeCuda) -> None:
    kernel = Kernel("launch_probe")
    params = [*arrays(), 5, 0.5]
    bound = kernel.launch_probe_5.bind(GRID, BLOCK, 0, 0, params)
    bound()
    kernel.unload()
    with pytest.raises(LaunchConfigError, match="bind it again"):
        bound()
    kernel.launch_probe_5.bind(GRID, BLOCK, 0, 0, params)()
    assert fakecuda.launch_count == 2


def test_a_kernel_that_died_holds_no_image(fakecuda: FakeCuda) -> None:
    first, second = Kernel("launch_probe"), Kernel("launch_probe")
    first.load()
    second.load()
    del first
    gc.collect()
    second.unload()
    assert fakecuda.live("libraries") == 0
