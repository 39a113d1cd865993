"""Exported functions on tensors: DLPack entries and TVM-FFI functions check, then launch."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from exported import COMPILERS, Dim3, shared_library
from fakecuda import FakeCuda
from fakecuda.helpers import make_stream
from in_threads import in_threads

from kernel_hub import DeviceArray, driver
from kernel_hub.arrays import dlpack, dtypes
from kernel_hub.collection.manifest import open_collection
from kernel_hub.formats import c_export

CPU, PINNED, MANAGED = 1, 3, 13
INVALID_VALUE, INVALID_CONTEXT, INVALID_DEVICE, NO_BINARY = 1, 201, 101, 209


def dl_tensor(
    dtype: str = "fp32",
    shape: Sequence[int] = (7,),
    strides: Sequence[int] | None = None,
    **fields: int,
) -> dlpack.DLTensor:
    """A DLTensor of no real memory, at 0x1000 on device 0 but for `fields`."""
    tensor, known = dlpack.DLTensor(), dtypes.of(dtype)
    tensor.data, tensor.ndim, tensor.device_type = 0x1000, len(shape), dlpack.CUDA
    tensor.code, tensor.bits, tensor.lanes = known.dlpack_code, 8 * known.size_bytes, 1
    if shape:
        tensor.shape = (ctypes.c_int64 * len(shape))(*shape)
    if strides is not None:
        tensor.strides = (ctypes.c_int64 * len(strides))(*strides)
    for name, value in fields.items():
        setattr(tensor, name, value)
    return tensor


def call(library: ctypes.CDLL, cubin: str, name: str, *values: Any) -> tuple[int, str]:
    """The DLPack entry's code in this thread's context, and its reason where it refused."""
    given = [ctypes.byref(v) if isinstance(v, dlpack.DLTensor) else v for v in values]
    code = library[f"{name}_dlpack"](
        ctypes.c_void_p(0), Dim3(2, 1, 1), Dim3(32, 1, 1), ctypes.c_uint(0), *given
    )
    reason = library[f"{cubin}_error"]
    reason.restype = ctypes.c_char_p
    return code, reason().decode() if code else ""


@pytest.fixture(params=COMPILERS)
def library(request: Any, tmp_path: Path, make_fakecuda: Callable[..., FakeCuda]) -> Any:
    """launch_probe with DLPack entries on a stand-in of two GPUs, and the stand-in."""
    fake = make_fakecuda(devices=2)
    c_export.export(["launch_probe"], tmp_path, dlpack=True)
    path = shared_library(tmp_path, "launch_probe", request.param, fake.path)
    return ctypes.CDLL(str(path)), fake


NUMBERS = (ctypes.c_int(7), ctypes.c_float(2.5))


def test_tensors_are_launched(library: Any) -> None:
    lib, fake = library
    tensors = [
        dl_tensor(byte_offset=64),
        dl_tensor(shape=(3, 4, 5), strides=(20, 5, 1), data=0x2000),
        dl_tensor(shape=(1, 7), strides=(99, 1), data=0x3000, device_type=MANAGED),
    ]
    with driver.get().on_device(0):
        assert call(lib, "launch_probe", "launch_probe_5", *tensors, *NUMBERS) == (0, "")
        null, empty = ctypes.c_void_p(0), dl_tensor(shape=(0, 4), strides=(9, 9))
        assert call(lib, "launch_probe", "launch_probe_5", empty, null, null, *NUMBERS) == (0, "")
    launch = next(fake.launches())
    assert launch.name == "launch_probe_5"
    assert launch.params == (
        *(address.to_bytes(8, "little") for address in (0x1040, 0x2000, 0x3000)),
        (7).to_bytes(4, "little"),
        struct.pack("<f", 2.5),
    )
    assert fake.launch().params[1] == bytes(8)


REFUSED = [
    (dl_tensor(device_type=CPU), INVALID_DEVICE, "must be in CUDA memory, found DLPack device "
     "type 1 (CPU): copy it to the GPU"),
    (dl_tensor(device_type=PINNED), INVALID_DEVICE, "found DLPack device type 3:"),
    (dl_tensor(device_id=1), INVALID_DEVICE, "is on cuda:1, the launch is on cuda:0"),
    (dl_tensor("bf16"), INVALID_VALUE, "must be float32, found bfloat16"),
    (dl_tensor("int32"), INVALID_VALUE, "must be float32, found int32"),
    (dl_tensor("e4m3"), INVALID_VALUE, "must be float32, found float8_e4m3fn"),
    (dl_tensor(code=200), INVALID_VALUE, "found DLPack code 200 of 32 bits"),
    (dl_tensor(lanes=4), INVALID_VALUE, "found float32 in vectors"),
    (dl_tensor(shape=(7,), strides=(2,)), INVALID_VALUE, "must be contiguous"),
    (dl_tensor(shape=(3, 4), strides=(1, 3)), INVALID_VALUE, "must be contiguous"),
    (dl_tensor(ndim=-1), INVALID_VALUE, "is no DLTensor"),
    (dl_tensor(shape=(), ndim=17), INVALID_VALUE, "it has 17 dimensions and no shape"),
]  # fmt: skip


@pytest.mark.parametrize("library", ["c"], indirect=True)
def test_refusals_name_the_argument(library: Any) -> None:
    lib, fake = library
    good = dl_tensor()
    for tensor, code, reason in REFUSED:
        with driver.get().on_device(0):
            found = call(lib, "launch_probe", "launch_probe_5", good, tensor, good, *NUMBERS)
        assert found[0] == code, found
        assert found[1].startswith("launch_probe_5: x ")
        assert reason in found[1]
    assert fake.launch_count == 0


def test_what_the_driver_refuses_has_a_reason_too(library: Any) -> None:
    lib, fake = library
    good = [dl_tensor()] * 3
    driver.get()
    code, reason = call(lib, "launch_probe", "launch_probe_5", *good, *NUMBERS)
    assert (code, reason) == (INVALID_CONTEXT, "launch_probe_5: CUDA_ERROR_INVALID_CONTEXT (201)")
    with driver.get().on_device(0):
        fake.set_kernel_attribute("launch_probe_5", 0, 16)
        code, reason = call(lib, "launch_probe", "launch_probe_5", *good, *NUMBERS)
        assert code == INVALID_VALUE
        assert "grid, block or shared_bytes are beyond a limit" in reason
        fake.set_capability(0, 7, 5)
        code, reason = call(lib, "launch_probe", "launch_probe_5", *good, *NUMBERS)
    assert code == NO_BINARY
    assert "built for sm80, sm89, sm90" in reason


def test_reasons_are_of_their_thread(library: Any) -> None:
    lib, _ = library
    good, seen = dl_tensor(), {}

    def work(index: int) -> None:
        with driver.get().on_device(0):
            bad = [good, good, good]
            bad[index] = dl_tensor("int8")
            for _ in range(50):
                code, reason = call(lib, "launch_probe", "launch_probe_5", *bad, *NUMBERS)
                seen.setdefault(index, set()).add((code, reason.split(" must")[0]))

    in_threads(*[partial(work, index) for index in range(3)])
    assert seen == {i: {(1, f"launch_probe_5: {name}")} for i, name in enumerate(("out", "x", "y"))}


def test_tensors_that_strides_are_taken_for_may_be_views(
    tmp_path: Path, fakecuda: FakeCuda
) -> None:
    """And void takes every dtype, unsigned integers pass for signed ones of their width."""
    c_export.export(["rope"], tmp_path, dlpack=True, archs=["sm90"])
    lib = ctypes.CDLL(str(shared_library(tmp_path, "rope", "c", fakecuda.path)))
    functions = open_collection("kernel_hub").manifest.cubins["rope"]["sm90"].functions
    name = "rope_bf16_half_vec1"
    numbers = {4: ctypes.c_int(1), 8: ctypes.c_int64(1)}
    null = ctypes.c_void_p(0)

    def values(**tensors: dlpack.DLTensor) -> list[Any]:
        return [
            tensors.get(param.name, null) if "*" in param.type else numbers[param.size_bytes]
            for param in functions[name].params
        ]

    view = dl_tensor("bf16", (4, 8), (64, 1))
    with driver.get().on_device(0):
        assert call(lib, "rope", name, *values(q=view, positions=dl_tensor("uint32"))) == (0, "")
        code, reason = call(lib, "rope", name, *values(cos=view))
    assert code == INVALID_VALUE
    assert reason.startswith(f"{name}: cos must be contiguous")


# ---- TVM-FFI ----
@pytest.fixture
def tvm_module(tmp_path: Path, make_fakecuda: Callable[..., FakeCuda]) -> Any:
    """`tvm_module(cubin)`: it as a TVM-FFI module, on a stand-in of two GPUs, and the stand-in."""
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    fake = make_fakecuda(devices=2)

    def build(cubin: str, language: str = "c", **options: Any) -> tuple[Any, FakeCuda]:
        c_export.export([cubin], tmp_path, tvm_ffi=True, **options)
        flags = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
        flags.append(tvm_ffi.libinfo.find_libtvm_ffi())
        path = shared_library(tmp_path, cubin, language, fake.path, flags)
        return tvm_ffi.load_module(str(path)), fake

    return build


@pytest.mark.parametrize("language", COMPILERS)
def test_a_tvm_ffi_function_launches(tvm_module: Any, language: str) -> None:
    import tvm_ffi

    module, fake = tvm_module("launch_probe", language)
    out, x, y = (DeviceArray.zeros(7, "fp32") for _ in range(3))
    assert module.launch_probe_5((4, 2), 64, 1024, out, x, y, 7, 2.5) is None
    launch = fake.launch()
    assert (launch.name, launch.gridDim, launch.blockDim, launch.sharedMemBytes) == (
        "launch_probe_5", (4, 2, 1), (64, 1, 1), 1024,
    )  # fmt: skip
    assert (launch.stream, launch.device) == (0, 0)
    assert launch.params == (
        *(array.ptr.to_bytes(8, "little") for array in (out, x, y)),
        (7).to_bytes(4, "little"),
        struct.pack("<f", 2.5),
    )
    stream = make_stream()
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream):
        module.launch_probe_5(tvm_ffi.Shape((4, 2, 3)), [64, 1, 2], 0, out, None, None, True, 2)
    launch = fake.launch()
    assert (launch.gridDim, launch.blockDim, launch.stream) == ((4, 2, 3), (64, 1, 2), stream)
    assert launch.params[1:] == (bytes(8),) * 2 + (b"\1\0\0\0", struct.pack("<f", 2))
    module.launch_probe_5(1, 32, 0, ctypes.c_void_p(0x77), None, None, -7, 2)
    assert fake.launch().params[0] == (0x77).to_bytes(8, "little")
    assert fake.launch().params[3] == (-7).to_bytes(4, "little", signed=True)


def test_a_tvm_ffi_function_runs_on_its_tensors_device(tvm_module: Any) -> None:
    module, fake = tvm_module("launch_probe")
    runtime = driver.get()
    arrays = []
    for device in (0, 1):
        with runtime.on_device(device):
            arrays.append([DeviceArray.zeros(7, "fp32", device=device) for _ in range(3)])
    with runtime.on_device(0):
        depth, context = fake.context_depth, runtime.current_context()
        for device in (0, 1):
            module.launch_probe_5(1, 32, 0, *arrays[device], 7, 2.5)
            assert fake.launch().device == device
        with pytest.raises(ValueError, match="y is on cuda:1, the launch is on cuda:0"):
            module.launch_probe_5(1, 32, 0, *arrays[0][:2], arrays[1][0], 7, 2.5)
        with pytest.raises(ValueError, match="x is on cuda:0, the launch is on cuda:1"):
            module.launch_probe_5(1, 32, 0, arrays[1][0], *arrays[0][1:], 7, 2.5)
        assert (fake.context_depth, runtime.current_context()) == (depth, context)
    seen: list[int] = []

    def work() -> None:  # a thread without a context
        module.launch_probe_5(1, 32, 0, *arrays[1], 7, 2.5)
        seen.extend((fake.launch().device, fake.context_depth))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1, 0]
    assert fake.calls("cuLibraryLoadData") == 1


def test_tvm_ffi_refusals(tvm_module: Any) -> None:
    torch = pytest.importorskip("torch")
    module, fake = tvm_module("launch_probe")
    probe = module.launch_probe_5
    good = DeviceArray.zeros(7, "fp32")
    wrong: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ValueError, r"out must be in CUDA memory, found DLPack device type 1 \(CPU\)",
         (1, 32, 0, torch.zeros(7), good, good, 7, 1.0)),
        (ValueError, "x must be float32, found float16",
         (1, 32, 0, good, DeviceArray.zeros(7, "fp16"), good, 7, 1.0)),
        (TypeError, "x takes a tensor, None, or an address as an opaque pointer",
         (1, 32, 0, good, 4096, good, 7, 1.0)),
        (TypeError, "num_elements takes an int", (1, 32, 0, good, good, good, 7.0, 1.0)),
        (TypeError, "scale takes a float", (1, 32, 0, good, good, good, 7, "1")),
        (ValueError, "num_elements is 2147483648, the range is -2147483648 to 2147483647",
         (1, 32, 0, good, good, good, 2**31, 1.0)),
        (ValueError, "shared_bytes is -1, the range is 0 to", (1, 32, -1, *[good] * 3, 7, 1.0)),
        (ValueError, "grid must be an int or a tuple", (0, 32, 0, *[good] * 3, 7, 1.0)),
        (ValueError, "grid must be", ((1, 2, 3, 4), 32, 0, *[good] * 3, 7, 1.0)),
        (ValueError, "block must be", (1, (), 0, *[good] * 3, 7, 1.0)),
        (ValueError, "block must be", (1, (32, 1.0), 0, *[good] * 3, 7, 1.0)),
        (ValueError, "block must be", (1, 2**32, 0, *[good] * 3, 7, 1.0)),
        (TypeError, "2 arguments given, it takes grid, block, shared_bytes, out, x, y, "
         "num_elements, scale", (1, 32)),
        (RuntimeError, r"launch_probe_5: CUDA_ERROR_INVALID_VALUE \(1\): grid, block",
         (1, 4096, 0, *[good] * 3, 7, 1.0)),
    ]  # fmt: skip
    for kind, says, arguments in wrong:
        with pytest.raises(kind, match=says):
            probe(*arguments)
    fake.set_capability(0, 12, 0)
    with pytest.raises(RuntimeError, match=r"NO_BINARY_FOR_GPU.*built for sm80, sm89, sm90"):
        probe(1, 32, 0, good, good, good, 7, 1.0)
    assert fake.launch_count == 0
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing


def test_tensor_maps_go_by_address(tvm_module: Any) -> None:
    """As opaque pointers to 128 bytes of host memory."""
    module, fake = tvm_module("batched_matmul_sm90")
    functions = open_collection("kernel_hub").manifest.cubins["batched_matmul_sm90"]["sm90"]
    function = next(iter(functions.functions.values()))
    maps = iter([bytes([i]) * 128 for i in range(1, 9)])
    sent, keep, values = [], [], []
    for param in function.params:
        if param.type == "CUtensorMap":
            sent.append(next(maps))
            keep.append(ctypes.create_string_buffer(sent[-1], 128))
            values.append(ctypes.c_void_p(ctypes.addressof(keep[-1])))
        else:
            values.append(None if "*" in param.type else 1)
    with driver.get().on_device(0):
        module[function.name](function.cluster or 1, 32, 0, *values)
    given = fake.launch().params
    assert given is not None
    assert [p for p in given if len(p) == 128] == sent
    assert sent
    wrong = [123 if isinstance(value, ctypes.c_void_p) else value for value in values]
    with pytest.raises(TypeError, match="takes an opaque pointer to the value in host memory"):
        module[function.name](1, 32, 0, *wrong)
