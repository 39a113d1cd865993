"""Clients of cpm_kernels on the stand-in driver: what they launch, and what they are told."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clients import HOPPER, OLDER, SIZES, import_client, prepared
from fakecuda import FakeCuda
from fakecuda.helpers import make_stream
from in_threads import in_threads

from kernel_hub import driver
from kernel_hub.arrays import interop
from kernel_hub.errors import CubinNotFoundError, ParamsError
from kernel_hub.integrations import cpm_kernels
from kernel_hub.integrations.cpm_kernels import base as base
from kernel_hub.integrations.cpm_kernels.device import Device

GEOMETRY: tuple[Any, ...] = ((3, 1, 1), (64, 1, 1), 0)
EXTRACTION = [ctypes.c_void_p(address) for address in (0x1000, 0x2000, 0x3000)]
EXTRACTION += [ctypes.c_int32(3), ctypes.c_int32(64)]  # type: ignore[list-item]
HALF = "int4WeightExtractionHalf"


class Pair(ctypes.Structure):
    """data/client.cu's."""

    _fields_ = (("first", ctypes.c_int32), ("second", ctypes.c_int32))


@pytest.fixture
def fake(make_fakecuda: Callable[..., FakeCuda]) -> FakeCuda:
    """A stand-in that records launches and knows the parameters of the client's functions."""
    return prepared(make_fakecuda())


@pytest.fixture
def client(alias: None, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client whose image has code for the stand-in's GPU."""
    return import_client(tmp_path, monkeypatch, HOPPER.read_bytes())


@pytest.fixture
def older(alias: None, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client whose image has code for 7.5 and 8.6 alone."""
    return import_client(tmp_path, monkeypatch, OLDER.read_bytes())


def test_importing_asks_nothing_of_the_driver(client: Any, fake: FakeCuda) -> None:
    assert client.failure is None
    assert fake.all_calls == 0
    from cpm_kernels.kernels import base

    assert base.DevicePointer is int
    assert base.CUDAStream is ctypes.c_void_p
    assert [base.round_up(x, 32) for x in (0, 1, 32, 33)] == [0, 32, 32, 64]
    assert not {"pkg_resources", "cpm_kernels.library"} & sys.modules.keys()


def test_a_launch(client: Any, fake: FakeCuda) -> None:
    assert client.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION) is None
    named = dict(zip(("gridDim", "blockDim", "sharedMemBytes"), GEOMETRY, strict=True))
    assert client.kernels.int4WeightExtractionHalf(**named, stream=0, params=EXTRACTION) is None
    first, second = fake.launches()
    assert first == second
    assert (first.name, first.gridDim, first.blockDim) == (HALF, (3, 1, 1), (64, 1, 1))
    assert first.params == tuple(bytes(value) for value in EXTRACTION)  # type: ignore[arg-type]


def test_a_structure_and_a_null_pointer(client: Any, fake: FakeCuda) -> None:
    params = [ctypes.c_void_p(16), Pair(7, -2), ctypes.c_void_p(0)]
    client.kernels.writePair((1, 1, 1), (1, 1, 1), 0, None, params)
    found = fake.launch().params
    assert found == (bytes(ctypes.c_void_p(16)), bytes(Pair(7, -2)), bytes(8))


@pytest.mark.parametrize(
    "wide", [ctypes.c_int64(64), ctypes.c_long(-2), ctypes.c_uint64(2**32 - 1), ctypes.c_int64(-1)]
)
def test_wider_integers(client: Any, fake: FakeCuda, wide: Any) -> None:
    client.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, [*EXTRACTION[:4], wide])
    params = fake.launch().params
    assert params is not None and params[4] == bytes(wide)[:4]


def test_params_live_until_the_launch_returns(client: Any, fake: FakeCuda) -> None:
    seen: list[int] = []

    def run(launch: Any, addresses: list[int]) -> None:
        gc.collect()
        seen.append(ctypes.c_int32.from_address(addresses[4]).value)

    fake.set_callback(HALF, run)
    numbers = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    client.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, (kind(4321) for kind in numbers))
    assert seen == [4321]


@pytest.mark.parametrize(
    "make",
    [
        lambda handle: handle,
        ctypes.c_void_p,
        lambda handle: SimpleNamespace(_as_parameter_=handle),
        lambda handle: SimpleNamespace(_as_parameter_=ctypes.c_void_p(handle)),
        lambda handle: SimpleNamespace(  # torch.cuda.Stream
            cuda_stream=handle, device_index=0, _as_parameter_=ctypes.c_void_p(handle)
        ),
    ],
)
def test_streams(client: Any, fake: FakeCuda, make: Callable[[int], Any]) -> None:
    handle = make_stream()
    client.kernels.int4WeightExtractionHalf(*GEOMETRY, make(handle), EXTRACTION)
    assert fake.launch().stream == handle


@pytest.mark.parametrize("stream", [0, None, ctypes.c_void_p(), ctypes.c_void_p(0)])
def test_the_legacy_stream(client: Any, fake: FakeCuda, stream: Any) -> None:
    client.kernels.int4WeightExtractionHalf(*GEOMETRY, stream, EXTRACTION)
    assert fake.launch().stream == 0


def test_torchs_current_device_from_any_thread(
    alias: None,
    make_fakecuda: Callable[..., FakeCuda],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = prepared(make_fakecuda(devices=2))
    client = import_client(tmp_path, monkeypatch, HOPPER.read_bytes())
    current = threading.local()
    monkeypatch.setattr(interop, "current_device", lambda: current.device)

    def work(device: int) -> None:
        current.device = device
        for _ in range(20):
            client.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION)

    in_threads(*[partial(work, device) for device in (0, 1, 1, 0)])
    assert sorted(launch.device for launch in fake.launches()) == [0] * 40 + [1] * 40


def test_an_unknown_function(client: Any, fake: FakeCuda) -> None:
    from cpm_kernels.kernels.base import KernelFunction

    wrong = KernelFunction(client.kernels.module, "int4WeightExtractionHafl")
    for kind in (AttributeError, RuntimeError):
        with pytest.raises(kind, match="named symbol not found") as caught:
            wrong(*GEOMETRY, 0, EXTRACTION)
        assert HALF in str(caught.value)
    assert fake.launch_count == 0


@pytest.mark.parametrize(
    ("geometry", "params", "kind", "text"),
    [
        (GEOMETRY, EXTRACTION[:4], TypeError, "too few params: got 4"),
        (GEOMETRY, [*EXTRACTION, ctypes.c_int32(1)], TypeError, "too many params: got 6"),
        (GEOMETRY, [*EXTRACTION[:4], ctypes.c_int16(64)], TypeError, r"params\[4\]"),
        (GEOMETRY, [*EXTRACTION[:4], ctypes.c_int64(1 << 32)], TypeError, r"params\[4\]"),
        (GEOMETRY, [*EXTRACTION[:4], ctypes.c_void_p(64)], TypeError, r"params\[4\]"),
        (GEOMETRY, [*EXTRACTION[:4], "64"], TypeError, r"params\[4\]"),
        (((3, 1, 1), (2048, 1, 1), 0), EXTRACTION, ValueError, "blockDim"),
        (((0, 1, 1), (32, 1, 1), 0), EXTRACTION, ValueError, "gridDim"),
        (((3, 1, 1), (32, 1, 1), 1 << 20), EXTRACTION, ValueError, "sharedMemBytes"),
        ((*GEOMETRY, "stream"), EXTRACTION, ValueError, "stream"),
    ],
)
def test_refused_launches(
    client: Any, fake: FakeCuda, geometry: Any, params: Any, kind: type[Exception], text: str
) -> None:
    arguments = geometry if len(geometry) == 4 else (*geometry, 0)
    with pytest.raises(RuntimeError, match=r"^CUDA Error: invalid argument\n") as caught:
        client.kernels.int4WeightExtractionHalf(*arguments, params)
    assert caught.match(text)
    assert isinstance(caught.value, kind)
    assert fake.launch_count == 0


def test_the_drivers_own_refusal(client: Any, fake: FakeCuda) -> None:
    fake.fail("cuLaunchKernelEx", 1)
    with pytest.raises(
        RuntimeError, match=r"(?s)^CUDA Error: invalid argument\n.*blockDim="
    ) as caught:
        client.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION)
    assert caught.value.code == 1  # type: ignore[attr-defined]
    client.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION)


def test_a_damaged_image_is_said_at_the_launch(alias: None, fake: FakeCuda) -> None:
    from cpm_kernels.kernels.base import KernelFunction, LazyKernelCModule

    damaged = KernelFunction(LazyKernelCModule(HOPPER.read_bytes()[:-100]), HALF)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"device kernel image is invalid\n.*truncated"):
            damaged(*GEOMETRY, 0, EXTRACTION)
    assert fake.calls("cuLibraryLoadData") == 0


def test_what_is_no_image_and_no_module(alias: None) -> None:
    from cpm_kernels.kernels.base import KernelFunction, LazyKernelCModule

    with pytest.raises(ParamsError, match="as bytes, not str"):
        LazyKernelCModule("image.fatbin")
    with pytest.raises(ParamsError, match="takes a LazyKernelCModule"):
        KernelFunction(HOPPER.read_bytes(), HALF)
    assert LazyKernelCModule(bytearray(b"ELF")) and LazyKernelCModule(memoryview(b"ELF"))


def test_without_a_driver_the_client_imports(
    alias: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(driver.LIBRARY_VARIABLE, str(tmp_path / "libcuda.so.1"))
    monkeypatch.setattr(driver.library, "_driver", None)
    client = import_client(tmp_path, monkeypatch, HOPPER.read_bytes())
    assert client.failure is None
    with pytest.raises(RuntimeError, match="no CUDA driver library could be loaded"):
        client.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION)


def test_get_module_loads(client: Any, fake: FakeCuda) -> None:
    module = client.kernels.module.get_module()
    assert set(SIZES) == set(module)
    assert fake.live("libraries") == 1
    client.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION)
    assert fake.calls("cuLibraryLoadData") == 1


def test_no_code_for_the_gpu(older: Any, fake: FakeCuda) -> None:
    for _ in range(2):
        with pytest.raises(CubinNotFoundError, match=r"^CUDA Error: no kernel image") as caught:
            older.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION)
        assert caught.match(rf"(?s){HALF} of the image of 22,112 bytes that client_22112 holds")
        assert caught.match(r"(?s)sm_75.*sm_86.*install\(substitute=True\)")
        assert set(caught.value.rejected) == {"sm_75", "sm_86"}
    with pytest.raises(RuntimeError, match="no kernel image"):
        older.kernels.module.get_module()
    assert fake.calls("cuLibraryLoadData") == 0


def test_substitutes(older: Any, fake: FakeCuda) -> None:
    cpm_kernels.install(substitute=True)
    with pytest.warns(RuntimeWarning) as caught:
        older.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION)
    (warned,) = caught
    said = str(warned.message)
    fitting = "int4WeightCompression, int4WeightExtractionHalf, int8WeightExtractionHalf"
    assert "the image of 22,112 bytes that client_22112 holds" in said
    assert "sm_75, sm_86" in said
    assert said.endswith(fitting)
    assert warned.filename == __file__
    assert fake.launch().params == tuple(map(bytes, EXTRACTION))
    with warnings.catch_warnings():  # once an image
        warnings.simplefilter("error")
        older.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION)
        older.kernels.int8WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION)
    assert fake.launch().name == "int8WeightExtractionHalf"
    assert fake.launch_count == 3


def test_functions_that_the_image_lacks_are_not_replaced(
    alias: None, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["int8WeightExtractionBFloat16", HALF]
    client = import_client(tmp_path, monkeypatch, OLDER.read_bytes(), names=names)
    cpm_kernels.install(substitute=True)
    with pytest.warns(RuntimeWarning, match=rf"in the place of {HALF}$"):
        client.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION)
    with pytest.raises(AttributeError, match="named symbol not found"):
        client.kernels.int8WeightExtractionBFloat16(*GEOMETRY, 0, EXTRACTION)
    assert fake.launch_count == 1


def test_substitutes_take_wider_integers(older: Any, fake: FakeCuda) -> None:
    cpm_kernels.install(substitute=True)
    with pytest.warns(RuntimeWarning):
        older.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, [*EXTRACTION[:4], ctypes.c_int64(64)])
    params = fake.launch().params
    assert params is not None and params[4] == bytes(ctypes.c_int32(64))


def test_a_clients_own_code_is_never_replaced(client: Any, fake: FakeCuda) -> None:
    cpm_kernels.install(substitute=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION)
    assert len(client.kernels.module.get_module()) == len(SIZES)  # the client's image, loaded
    assert fake.calls("cuLibraryLoadData") == 1


def test_no_substitute_of_other_parameters(older: Any, fake: FakeCuda) -> None:
    cpm_kernels.install(substitute=True)
    params = [*EXTRACTION[:3], ctypes.c_int64(3), ctypes.c_int64(64)]
    with pytest.raises(RuntimeError, match=r"\[8, 8, 8, 4, 4\].*\[8, 8, 8, 8, 8\]"):
        older.kernels.int8WeightExtractionFloat(*GEOMETRY, 0, params)
    with pytest.raises(RuntimeError, match="kernel_hub has no kernel writePair"):
        older.kernels.writePair((1, 1, 1), (1, 1, 1), 0, 0, params[:3])
    assert fake.launch_count == 0


def test_a_gpu_that_neither_has_code_for(
    alias: None,
    make_fakecuda: Callable[..., FakeCuda],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared(make_fakecuda(capability=(12, 0)))
    client = import_client(tmp_path, monkeypatch, OLDER.read_bytes())
    cpm_kernels.install(substitute=True)
    with pytest.warns(RuntimeWarning), pytest.raises(CubinNotFoundError, match=r"sm_90.*12.0"):
        client.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION)


def test_an_older_gpu_runs_the_older_code(
    alias: None,
    make_fakecuda: Callable[..., FakeCuda],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = prepared(make_fakecuda(capability=(8, 9)))
    client = import_client(tmp_path, monkeypatch, OLDER.read_bytes())
    client.kernels.int4WeightExtractionHalf(*GEOMETRY, 0, EXTRACTION)
    assert fake.launch_count == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: base.Kernel("gemm", None), "list of functions' names"),
        (lambda: base.Kernel("gemm", [5]), "list of functions' names"),
        (lambda: base.Kernel("gemm", "name"), "list of functions' names"),
        (lambda: base.Kernel("../../x", []), "name of a file"),
        (lambda: base.Kernel("", []), "name of a file"),
        (lambda: base.Kernel(None, []), "name of a file"),
        (lambda: base.KernelFunction(base.LazyKernelCModule(b""), []), "a function's name"),
    ],
)
def test_names_of_the_wrong_kind(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as raised:
        make()
    assert isinstance(raised.value, ParamsError)


@pytest.mark.parametrize("index", ["x", None, 1.0])
def test_a_device_is_a_number(fake: FakeCuda, index: Any) -> None:
    with pytest.raises(ParamsError, match="the number of a GPU"):
        Device(index)
