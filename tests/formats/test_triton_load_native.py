"""Triton kernels through the C launcher and through Python: same launches, same refusals."""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_torch import FP16, Tensor, fake_torch
from fakecuda import FakeCuda
from fakecuda.helpers import make_stream
from triton_data import DATA, VERSIONS, hidden

from kernel_hub.errors import KernelHubError, LaunchConfigError
from kernel_hub.formats import triton
from kernel_hub.launch import c_launcher

pytestmark = pytest.mark.skipif(
    not c_launcher.available(), reason="the shipped C launcher does not fit this Python or platform"
)
X, Y, Z = (Tensor(0x7F0000001000 + 256 * i) for i in range(3))
GOOD = [X, Y, Z, 32]
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (((4, 1, 1), None, None, None, GOOD), {}),
    ((4,), {"params": tuple(GOOD)}),
    (((2, 3),), {"params": GOOD, "stream": 0}),
    (((2,),), {"params": [None, X, None, -32]}),
    ((4, (128, 1, 1), 0), {"params": GOOD}),
    ((4, 128), {"params": GOOD, "sharedMemBytes": 0}),
    ((4,), {"params": dict(zip(("arg0", "arg1", "arg2", "arg3"), GOOD, strict=True))}),
    ((4,), {"params": GOOD, "priority": 0}),
    ((4, 256), {"params": GOOD}),
    ((4, None, 16), {"params": GOOD}),
    ((0,), {"params": GOOD}),
    (((1, 2, 3, 4),), {"params": GOOD}),
    (((),), {"params": GOOD}),
    (((1, 65536, 1),), {"params": GOOD}),
    ((4,), {"params": [X, Y, Z, 33]}),
    ((4,), {"params": [X, Y, Z, -1]}),
    ((4,), {"params": [X, Y, Z, 2**31]}),
    ((4,), {"params": [X, Y, Z, True]}),
    ((4,), {"params": [X, Y, Z, X]}),
    ((4,), {"params": [Tensor(0x7F0000001004), Y, Z, 32]}),
    ((4,), {"params": [X, Tensor(0x7F0000001008), Z, 32]}),
    ((4,), {"params": [Tensor(4096, FP16), Y, Z, 32]}),
    ((4,), {"params": [Tensor(4096, cuda=False), Y, Z, 32]}),
    ((4,), {"params": [X, Y, Z]}),
    ((4,), {"params": [*GOOD, None]}),
    ((4,), {"params": [*GOOD, None, None]}),
    ((4,), {}),
    ((), {"params": GOOD}),
    ((4,), {"params": GOOD, "stream": "s"}),
    ((4,), {"params": GOOD, "cluster": 2}),
]


@pytest.fixture(params=["attributes", "exchange API"])
def stream(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> list[int]:
    return fake_torch(monkeypatch, request.param == "exchange API")


def armed(version: str) -> Any:
    f = triton.load(DATA / version, "add_kernel")
    f[1](*GOOD)
    assert f.func is not f._launch, "the C launcher is in front"
    return f


def outcome(fake: FakeCuda, function: Any, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    before = fake.launch_count
    try:
        function(*call[0], **call[1])
    except (KernelHubError, TypeError) as error:
        assert fake.launch_count == before
        return type(error), str(error)
    assert fake.launch_count == before + 1
    return fake.launch()


@pytest.mark.parametrize("version", ["3.0.0", "3.3.1"])
def test_both_do_the_same(fakecuda: FakeCuda, stream: list[int], version: str) -> None:
    f = armed(version)
    stream[0] = make_stream()
    for call in CALLS:
        assert outcome(fakecuda, f, call) == outcome(fakecuda, f._launch, call), call


def test_a_launcher_of_one_grid_does_the_same(fakecuda: FakeCuda, stream: list[int]) -> None:
    f = armed("3.3.1")
    stream[0], other = make_stream(), make_stream()
    at, plain = f[(4, 2)], f._names["at"]((4, 2, 1))
    assert at is f[(4, 2)] is f[[4, 2]]
    assert at is not plain
    f._names["call"] = f._launch  # what `plain` calls
    for _, named in CALLS:
        params = named.get("params", [])
        if isinstance(params, dict):
            continue
        for words in ({}, {"stream": other}, {"stream": None}, {"stream": "s"}, {"grid": 4}):
            call = (tuple(params), words)
            assert outcome(fakecuda, at, call) == outcome(fakecuda, plain, call), call
    for params in (GOOD[:3], GOOD):
        call = (tuple(params), {"arg3": 32, "stream": 0})
        assert outcome(fakecuda, at, call) == outcome(fakecuda, plain, call)
    assert f[np.array([4, 2])](*GOOD) is None
    huge = f[(1 << 33, 1)]
    with pytest.raises(LaunchConfigError, match="gridDim"):
        huge(*GOOD)
    with pytest.raises(LaunchConfigError, match="gridDim"):
        f[(1, 1 << 17)](*GOOD)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_common_case_stays_in_c(fakecuda: FakeCuda, stream: list[int], version: str) -> None:
    f = armed(version)
    f._names["inner"] = None  # Python would stumble over it
    stream[0] = make_stream()
    f((4, 1, 1), params=GOOD)
    f[(4,)](*GOOD)
    f[(4,)](*GOOD[:3], **{(f.params or ())[3].name: 32})
    for launch in list(fakecuda.launches())[1:]:
        assert (launch.gridDim, launch.blockDim) == ((4, 1, 1), (128, 1, 1))
        assert launch.stream == stream[0]
        assert launch.params == (
            *(struct.pack("<Q", tensor.address) for tensor in (X, Y, Z)),
            struct.pack("<i", 32),
            *(bytes(8),) * hidden(version),
        )
    assert fakecuda.launch_count == 4


def test_shared_memory_beyond_the_plain_limit(
    fakecuda: FakeCuda, stream: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    f = triton.load(DATA / "3.9.0", "matmul_kernel")
    half = [Tensor(0x7F0000002000 + 4096 * i, FP16) for i in range(3)]
    numbers = [64, 64, 64, 64, 64, 64, 0.5]
    f[(2, 2)](*half, *numbers)
    f._names["inner"] = None
    f[(2, 2)](*half, *numbers)
    first, second = fakecuda.launches()
    assert (first.params, first.sharedMemBytes) == (second.params, second.sharedMemBytes)
    assert first.sharedMemBytes == f.metadata.shared_bytes > 0


def test_what_c_does_not_do_stays_in_python(fakecuda: FakeCuda, stream: list[int]) -> None:
    cluster = triton.load(DATA / "3.3.1", "cluster_kernel")
    scratch = triton.load(DATA / "3.4.0", "scratch_kernel")
    for _ in range(2):
        cluster[2](*GOOD)
        scratch[2](X, Y, 32, 32)
    assert (cluster.func, scratch.func) == (cluster._launch, scratch._launch)
    assert fakecuda.launch_count == 4


def test_unloading_disarms_and_the_next_launch_arms_again(
    fakecuda: FakeCuda, stream: list[int]
) -> None:
    f = armed("3.9.0")
    run = f[(4,)]
    run(*GOOD)
    f._loader.unload({}, f._inner._forget)
    assert fakecuda.live("libraries") == 0
    run(*GOOD)
    assert fakecuda.live("libraries") == 1
    f._names["inner"] = None
    run(*GOOD)
    f(4, params=GOOD)
    assert fakecuda.launch_count == 5
    del f
    gc.collect()
    run(*GOOD)  # outlives its function
    assert fakecuda.launch_count == 6


def test_torch_that_comes_later(
    make_fakecuda: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = make_fakecuda()
    f = triton.load(DATA / "3.9.0", "add_kernel")
    f[1](None, None, None, 16)
    assert f.func is f._launch
    fake_torch(monkeypatch, True)
    f[1](*GOOD)
    assert f.func is not f._launch
    assert fake.launch_count == 2


@pytest.mark.parametrize("variable", ["KERNEL_HUB_NATIVE", "KERNEL_HUB_LAUNCH_BLOCKING"])
def test_without_c(
    fakecuda: FakeCuda, stream: list[int], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "0" if variable.endswith("NATIVE") else "1")
    f = triton.load(DATA / "3.9.0", "add_kernel")
    f[1](*GOOD)
    f[1](*GOOD)
    assert f.func is f._launch
    assert fakecuda.launch_count == 2
