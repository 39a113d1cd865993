"""Arrays, streams and devices of other libraries: what they are taken for, what comes before what.

JAX, cuda.core and cuda.bindings are themselves where installed; what needs a GPU to exist has
stand-ins that speak the same protocols, and tests/gpu/test_arrays_gpu.py the real ones.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import BLOCK, GRID, make_stream

from kernel_hub import DeviceArray, Kernel, KernelFunction, TensorMap, driver
from kernel_hub.arrays import interop
from kernel_hub.errors import CudaDriverError, LaunchConfigError, ParamsError, TensorError

ROOT = Path(__file__).resolve().parents[2]


class Device:
    """CuPy's: `id`; cuda.core's: `device_id`."""

    def __init__(self, **number: int) -> None:
        self.__dict__.update(number)


class InterfaceArray:
    """As CuPy's and Numba's: version 3 of the interface, with the stream of its own work."""

    def __init__(self, base: DeviceArray, stream: int | None = None, dtype: Any = None) -> None:
        self.base, self.stream = base, stream
        self.device = Device(id=base.device)
        self.dtype = dtype or base.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        typestr = "<V2" if str(self.dtype) == "bfloat16" else self.dtype.str
        own = {"stream": self.stream, "typestr": typestr}
        return {**self.base.__cuda_array_interface__, **own}


class DlpackArray:
    """Only DLPack, and a record of the streams it was asked with."""

    def __init__(self, base: DeviceArray) -> None:
        self.base = base
        self.asked: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.base.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None) -> Any:
        self.asked.append(stream)
        # To JAX None is no order, which is -1 elsewhere.
        return self.base.__dlpack__(stream=stream or -1, max_version=max_version)


class JaxArray(DlpackArray):
    def is_deleted(self) -> bool:
        return False


JaxArray.__module__ = "jaxlib._jax"


class Buffer:
    """cuda.core's: bytes without a dtype."""

    memory_resource = None
    is_closed = False
    is_device_accessible = True
    is_host_accessible = False

    def __init__(self, base: DeviceArray, **changed: Any) -> None:
        self.handle, self.size, self.device = base.ptr, base.size_bytes, base.device
        self.__dict__.update(changed)

    @property
    def device_id(self) -> int:
        if self.is_host_accessible:
            raise RuntimeError("a pinned memory resource is not bound to any GPU")
        return self.device


Buffer.__module__ = "cuda.core._memory._buffer"


class CupyStream:
    def __init__(self, ptr: int, device_id: int = 0) -> None:
        self.ptr, self.device_id = ptr, device_id

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.ptr)


def zeros(device: int = 0) -> DeviceArray:
    return DeviceArray.zeros(1024, "fp32", device=device)


def waits(fake: FakeCuda) -> tuple[int, int]:
    """(events recorded, waits for one); none may be left over."""
    assert fake.live("events") == 0
    return fake.calls("cuEventRecord"), fake.calls("cuStreamWaitEvent")


# ---- what comes before what


def test_a_launch_waits_for_an_arrays_own_stream(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    own, other = make_stream(), make_stream()
    arrays = [zeros() for _ in range(3)]
    out, x, y = (InterfaceArray(a, own) for a in arrays)
    probe(GRID, BLOCK, 0, own, [out, x, y, 1024, 0.5])
    assert waits(fakecuda) == (0, 0), "the same stream"
    probe(GRID, BLOCK, 0, other, [out, x, y, 1024, 0.5])
    assert waits(fakecuda) == (3, 3)
    probe(GRID, BLOCK, 0, other, [*arrays[:2], y, 1024, 0.5])
    assert waits(fakecuda) == (4, 4)
    launch = fakecuda.launch()
    assert launch.stream == other
    assert launch.params is not None
    assert launch.params[2] == arrays[2].ptr.to_bytes(8, "little")


@pytest.mark.parametrize(("own", "used"), [(1, None), (1, 0), (None, 0), (0, 1), (2, 2)])
def test_default_streams_have_two_names(
    fakecuda: FakeCuda, probe: KernelFunction, own: int | None, used: int | None
) -> None:
    params = [InterfaceArray(zeros(), own) for _ in range(3)]
    probe(GRID, BLOCK, 0, used, [*params, 1024, 0.5])
    assert waits(fakecuda) == (0, 0)


def test_several_devices(make_fakecuda: Callable[..., FakeCuda]) -> None:
    fake = make_fakecuda(devices=2)
    probe = Kernel("launch_probe").launch_probe_5
    own, other = make_stream(1), make_stream(1)
    params = [InterfaceArray(zeros(1), own) for _ in range(3)]
    probe(GRID, BLOCK, 0, other, [*params, 1024, 0.5])
    assert waits(fake) == (3, 3)
    assert fake.launch().device == 1
    with pytest.raises(ParamsError, match="on device 0"):
        probe(GRID, BLOCK, 0, other, [params[0], InterfaceArray(zeros()), params[2], 1024, 0.5])


def test_nothing_from_outside_enters_a_capture(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    own, captured = make_stream(blocking=False), make_stream(blocking=False)
    interface, jax = InterfaceArray(zeros(), own), JaxArray(zeros())
    params = [interface, jax, DlpackArray(zeros()), 1024, 0.5]
    probe.load()
    fakecuda.set_capture(captured)
    probe(GRID, BLOCK, 0, captured, params)
    assert (fakecuda.launch().stream, waits(fakecuda)) == (captured, (0, 0))
    assert jax.asked == [None]
    fakecuda.set_capture(captured, 0)
    fakecuda.set_capture(own)
    probe(GRID, BLOCK, 0, captured, [interface] * 3 + params[3:])
    assert waits(fakecuda) == (0, 0)
    fakecuda.set_capture(own, 0)


def test_a_stream_that_is_none(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    gone = make_stream()
    driver.get().call("cuStreamDestroy_v2", gone)
    params = [InterfaceArray(zeros(), gone) for _ in range(3)]
    with pytest.raises(CudaDriverError, match=f"{gone:#x}"):
        probe(GRID, BLOCK, 0, None, [*params, 1024, 0.5])
    assert fakecuda.launch_count == 0
    assert fakecuda.live("events") == 0


def test_a_bound_launch_waits_when_it_is_bound(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    own, other = make_stream(), make_stream()
    params = [InterfaceArray(zeros(), own) for _ in range(3)]
    bound = probe.bind(GRID, BLOCK, 0, other, [*params, 1024, 0.5])
    assert waits(fakecuda) == (3, 3)
    bound()
    assert waits(fakecuda) == (3, 3)


def test_dlpack_producers_are_told_the_stream(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    arrays = [DlpackArray(zeros()), JaxArray(zeros()), DlpackArray(zeros())]
    stream = make_stream()
    for used in (None, stream):
        probe(GRID, BLOCK, 0, used, [*arrays, 1024, 0.5])
    assert [array.asked for array in arrays] == [[1, stream]] * 3
    assert [interop.describe(array) is not None for array in arrays] == [True] * 3
    assert [array.asked[-1] for array in arrays] == [-1, None, -1], "asked for nothing"


# ---- what they are taken for


def test_dtypes_of_other_arrays(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    raw = DeviceArray.zeros(8, "uint16")
    described = interop.describe(InterfaceArray(raw, dtype=np.dtype(bfloat16)))
    assert described is not None
    assert described.dtype == "bf16"
    int8 = DlpackArray(DeviceArray.zeros(4096, "int8"))
    with pytest.raises(ParamsError, match=r"int8 \[4096\].*convert it to fp32"):
        probe(GRID, BLOCK, 0, None, [int8, zeros(), zeros(), 1024, 0.5])


def test_buffers_of_cuda_core(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    base = DeviceArray.zeros(4096, "int8")
    pinned = Buffer(base, is_host_accessible=True)
    probe(GRID, BLOCK, 0, None, [Buffer(base), pinned, zeros(), 1024, 0.5])
    launch = fakecuda.launch()
    assert launch.params is not None
    assert launch.params[:2] == (base.ptr.to_bytes(8, "little"),) * 2
    for wrong, message in (
        (Buffer(base, is_closed=True), "was closed"),
        (Buffer(base, handle=0), "was closed"),
        (Buffer(base, is_device_accessible=False), "no GPU can reach"),
        (Buffer(base, device=1), r"\[4096\] on device 1"),
    ):
        with pytest.raises(ParamsError, match=message):
            probe(GRID, BLOCK, 0, None, [wrong, pinned, zeros(), 1024, 0.5])
    assert fakecuda.launch_count == 1


def test_arrays_of_types_without_a_token(fakecuda: FakeCuda) -> None:
    pairs = InterfaceArray(DeviceArray.zeros(8, "fp64"), dtype=np.dtype("complex64"))
    described = interop.describe(pairs)
    assert described is not None
    assert described.dtype is None
    with pytest.raises(TensorError, match="unknown dtype"):
        TensorMap.tiled(pairs, (8,))


def test_a_producer_that_refuses(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    class Spread(DlpackArray):
        def __dlpack_device__(self) -> tuple[int, int]:
            raise BufferError("only supported for unsharded arrays")

    class Failing(DlpackArray):
        def __dlpack__(self, **_: Any) -> Any:
            raise RuntimeError("no buffer")

    for array, message in ((Spread, "unsharded arrays"), (Failing, "no buffer")):
        with pytest.raises(ParamsError, match=rf"params\[1\] \(x\).*one GPU.*{message}"):
            probe(GRID, BLOCK, 0, None, [zeros(), array(zeros()), zeros(), 1024, 0.5])
        with pytest.raises(TensorError, match=message):
            DeviceArray.from_dlpack(array(zeros()))
    assert fakecuda.launch_count == 0


# Runs alone: JAX takes a second to import, and the number of its devices once.
JAX = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernel_hub import tensors
from kernel_hub.errors import TensorError

def say(array):
    try:
        print(tensors.describe(array))
    except TensorError as error:
        print(error)
    return array

say(jnp.ones(4))
mesh = Mesh(np.array(jax.devices()), ("x",))
say(jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec("x"))))
gone = jnp.ones(4)
gone.delete()
say(gone)
for transform in (jax.jit, jax.vmap):
    transform(say)(jnp.ones(4))
jax.grad(lambda x: say(x).sum())(jnp.ones(4))
"""


def test_jax_arrays_that_are_no_memory_of_one_gpu() -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    done = subprocess.run(
        [sys.executable, "-c", JAX], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 6, done.stderr
    assert "not in CUDA memory (DLPack device type 1)" in lines[0]
    assert "not one array in the memory of one GPU" in lines[1]
    assert "unsharded" in lines[1]
    assert "deleted or donated" in lines[2]
    assert all("JAX is tracing" in line for line in lines[3:])


# ---- streams and devices


def test_streams_of_other_libraries() -> None:
    class OldNumba:
        handle = ctypes.c_void_p(0x3000)

    class OldCupy:
        ptr = 0x4000

    for stream, handle in ((CupyStream(0x2000), 0x2000), (OldNumba(), 0x3000), (OldCupy(), 0x4000)):
        assert interop.stream_handle(stream, 0) == handle
    OldNumba.handle = ctypes.c_void_p(None)
    assert interop.stream_handle(OldNumba(), 0) == 0
    with pytest.raises(LaunchConfigError, match=r"belongs to device 1, .* device 0"):
        interop.stream_handle(CupyStream(0x2000, device_id=1), 0)
    assert interop.stream_handle(CupyStream(0, device_id=-1), 1) == 0
    with pytest.raises(LaunchConfigError, match="is no stream"):
        interop.stream_handle(3.0, 0)


def test_streams_of_cuda_core_and_bindings() -> None:
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    from cuda.bindings import driver, runtime

    assert interop.stream_handle(core.Stream.from_handle(0x1234), 0) == 0x1234
    assert interop.stream_handle(core.LEGACY_DEFAULT_STREAM, 0) == 1
    assert interop.stream_handle(core.PER_THREAD_DEFAULT_STREAM, 0) == 2
    assert interop.stream_handle(driver.CUstream(0x5000), 0) == 0x5000
    assert interop.stream_handle(runtime.cudaStream_t(0x6000), 0) == 0x6000


def test_devices_of_other_libraries(make_fakecuda: Callable[..., FakeCuda]) -> None:
    make_fakecuda(devices=2)
    devices: list[Any] = [1, "cuda:1", np.int64(1), Device(id=1), Device(device_id=1)]
    if torch := interop.loaded_torch():
        devices.append(torch.device("cuda:1"))
        assert interop.device_index(torch.device("cuda")) == 0
    for device in devices:
        assert DeviceArray.zeros(4, device=device).device == 1
        kernel = Kernel("launch_probe")
        kernel.launch_probe_5.load(device)
        assert set(kernel.launch_probe_5._states) == {1}
    for wrong in ("cuda:x", 1.0, object()):
        with pytest.raises(LaunchConfigError, match="device="):
            Kernel("launch_probe").load(wrong)
