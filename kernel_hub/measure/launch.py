"""The cost of a launch: kernel_hub beside a C loop and every launcher that is installed.

All contenders launch the same shipped kernels on the same buffers, interleaved in one process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from .. import Kernel, driver
from ..errors import KernelHubError
from .results import ResultRow, summarise

LAUNCHES = 300
THREADS = 256
NUM_ELEMENTS = 1024
GRID = (NUM_ELEMENTS // THREADS, 1, 1)
BLOCK = (THREADS, 1, 1)
FLOOR = "C loop"
Contender = Callable[[int], float]


def run(rounds: int = 60, progress: Callable[[str], None] = lambda text: None) -> list[ResultRow]:
    """Rows of nanoseconds a launch for 5 and 12 parameters, and of the eager rms_norm call."""
    import torch

    rows: list[ResultRow] = []
    kernel = Kernel("launch_probe")
    x = [torch.randn(NUM_ELEMENTS, device="cuda") for _ in range(6)]
    cases = {
        "3 tensors + int + float": (
            kernel.launch_probe_5,
            [x[0], x[1], x[2], NUM_ELEMENTS, 0.5],
        ),
        "12 parameters": (
            kernel.launch_probe_12,
            [*x, NUM_ELEMENTS, 3, 7, 0.5, 0.25, 1],
        ),
    }
    for case, (function, params) in cases.items():
        contenders = dict(_contenders(function, params, progress))
        progress(f"{case}: {len(contenders)} contenders")
        rows += summarise("launch", case, interleave(contenders, rounds), "ns", ratio_to=FLOOR)
    progress("eager rms_norm")
    return rows + _eager_rms_norm(rounds)


def interleave(contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Nanoseconds a launch of each contender, `rounds` of them in turn, once they are warm."""
    import torch

    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(3):
        for run_once in contenders.values():
            run_once(LAUNCHES)
            torch.cuda.synchronize()
    for _ in range(rounds):
        for name, run_once in contenders.items():
            samples[name].append(run_once(LAUNCHES))
            torch.cuda.synchronize()
    return samples


def timed(call: Callable[[], Any]) -> Contender:
    """A contender that calls `call` in a Python loop and returns nanoseconds a call."""

    def run_once(count: int) -> float:
        start = time.perf_counter_ns()
        for _ in range(count):
            call()
        return (time.perf_counter_ns() - start) / count

    return run_once


def _contenders(
    function: Any, params: list[Any], progress: Callable[[str], None]
) -> Iterator[tuple[str, Contender]]:
    function(GRID, BLOCK, 0, None, params)
    bound = function.bind(GRID, BLOCK, 0, None, params)
    yield "kernel_hub", timed(partial(function, GRID, BLOCK, 0, None, params))
    yield (
        "kernel_hub keywords",
        timed(partial(function, gridDim=GRID, blockDim=BLOCK, sharedMemBytes=0, params=params)),
    )
    yield "kernel_hub bound", timed(bound)
    handle = function.load()._state(0, 0).handle
    peers = (_floor, _plain_ctypes, _cuda_core, _cupy, _tvm_ffi, _triton)
    for peer in peers:
        try:
            made = peer(handle, params)
        except (ImportError, OSError, AttributeError, RuntimeError, KernelHubError) as error:
            progress(f"without {peer.__name__.strip('_')}: {type(error).__name__}: {error}")
            continue
        if made is not None:
            yield made


def _arguments(params: list[Any]) -> tuple[Any, Any]:
    """(array of addresses, the values it points to) as a C caller prepares them."""
    values: list[Any] = []
    for index, value in enumerate(params):
        if hasattr(value, "data_ptr"):
            values.append(ctypes.c_void_p(value.data_ptr()))
        elif isinstance(value, float):
            values.append(ctypes.c_float(value))
        else:
            wide = len(params) == 12 and index == 8  # launch_probe_12's int64_t offset
            values.append((ctypes.c_int64 if wide else ctypes.c_int)(value))
    addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
    return addresses, values


def _floor(handle: int, params: list[Any]) -> tuple[str, Contender]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("no C compiler for the floor")
    folder = Path(tempfile.mkdtemp(prefix="kernel_hub_floor_"))
    source, library = folder / "floor.c", folder / "floor.so"
    source.write_text(files(__package__).joinpath("launch_floor.c").read_text())
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    loop = ctypes.CDLL(str(library)).floor_launch
    shutil.rmtree(folder)
    loop.restype = ctypes.c_double
    loop.argtypes = (
        [ctypes.c_void_p] * 2 + [ctypes.c_uint] * 2 + [ctypes.c_void_p] * 2 + [ctypes.c_int]
    )
    launch = ctypes.cast(ctypes.CDLL(driver.get().path).cuLaunchKernel, ctypes.c_void_p)
    addresses, values = _arguments(params)

    def run_once(count: int, keep: Any = values) -> float:
        result = loop(launch, handle, GRID[0], THREADS, None, addresses, count)
        if result < 0:
            raise RuntimeError(f"cuLaunchKernel returned {-result:.0f}")
        return float(result)

    return FLOOR, run_once


def _plain_ctypes(handle: int, params: list[Any]) -> tuple[str, Contender]:
    """Eleven fresh ctypes objects a launch, as cpm_kernels launches."""
    library = ctypes.CDLL(driver.get().path)
    import torch

    def call() -> None:
        addresses, _values = _arguments(params)
        library.cuLaunchKernel(
            ctypes.c_void_p(handle),
            *(ctypes.c_uint(n) for n in (*GRID, *BLOCK, 0)),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            addresses,
            None,
        )

    return "ctypes, fresh objects", timed(call)


def _cuda_core(handle: int, params: list[Any]) -> tuple[str, Contender]:
    import numpy as np
    import torch

    try:
        from cuda.core import Device, LaunchConfig, ObjectCode, launch
    except ImportError:
        from cuda.core.experimental import Device, LaunchConfig, ObjectCode, launch
    device = Device(torch.cuda.current_device())
    device.set_current()
    stream = device.create_stream(torch.cuda.current_stream())
    kernel = ObjectCode.from_cubin(_image()).get_kernel(_name(params))
    config = LaunchConfig(grid=GRID, block=BLOCK)
    kinds = [np.int64 if len(params) == 12 and i == 8 else np.int32 for i in range(len(params))]

    def call() -> None:
        values = [
            p.data_ptr()
            if hasattr(p, "data_ptr")
            else np.float32(p)
            if isinstance(p, float)
            else kinds[i](p)
            for i, p in enumerate(params)
        ]
        launch(stream, config, kernel, *values)

    call()
    return "cuda.core", timed(call)


def _cupy(handle: int, params: list[Any]) -> tuple[str, Contender]:
    import cupy as cp
    import numpy as np

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(_image())
        file.flush()
        function = cp.RawModule(path=file.name).get_function(_name(params))
        arrays = [cp.asarray(p) if hasattr(p, "data_ptr") else p for p in params]
        scalars = tuple(
            np.float32(p)
            if isinstance(p, float)
            else (np.int64 if len(params) == 12 and i == 8 else np.int32)(p)
            if isinstance(p, int)
            else p
            for i, p in enumerate(arrays)
        )
        function(GRID, BLOCK, scalars)
    return "CuPy", timed(partial(function, GRID, BLOCK, scalars))


def _tvm_ffi(handle: int, params: list[Any]) -> tuple[str, Contender] | None:
    if len(params) != 5:
        return None
    import torch
    from tvm_ffi import cpp

    source = r"""
    #include <tvm/ffi/container/tensor.h>
    #include <tvm/ffi/extra/c_env_api.h>
    #include <tvm/ffi/extra/cuda/cubin_launcher.h>
    #include <tvm/ffi/function.h>
    TVM_FFI_EMBED_CUBIN(probe);
    namespace probe {
    using tvm::ffi::TensorView;
    void Launch(TensorView out, TensorView x, TensorView y, int64_t n, double scale) {
      static auto kernel = TVM_FFI_EMBED_CUBIN_GET_KERNEL(probe, "launch_probe_5");
      void *o = out.data_ptr(), *a = x.data_ptr(), *b = y.data_ptr();
      int count = (int)n;
      float s = (float)scale;
      void* args[] = {&o, &a, &b, &count, &s};
      DLDevice device = out.device();
      auto stream = static_cast<tvm::ffi::cuda_api::StreamHandle>(
          TVMFFIEnvGetStream(device.device_type, device.device_id));
      TVM_FFI_CHECK_CUBIN_LAUNCHER_CUDA_ERROR(
          kernel.Launch(args, tvm::ffi::dim3(4), tvm::ffi::dim3(256), stream));
    }
    TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch, probe::Launch);
    }
    """
    module = cpp.load_inline(
        "kernel_hub_probe", cuda_sources=source, embed_cubin={"probe": _image()}
    )
    out, x, y, n, scale = params
    module.launch(out, x, y, n, scale)
    assert torch.isfinite(out).all()
    return "TVM-FFI", timed(partial(module.launch, out, x, y, n, scale))


def _triton(handle: int, params: list[Any]) -> tuple[str, Contender] | None:
    if len(params) != 5:
        return None
    from .triton_probe import kernel

    out, x, y, n, scale = params
    launcher = kernel[(GRID[0],)]
    call = partial(launcher, out, x, y, n, scale, BLOCK=THREADS)
    call()
    return "Triton", timed(call)


def _image() -> bytes:
    from ..collection.manifest import open_collection

    collection = open_collection()
    major, minor = driver.get().compute_capability(0)
    entries = collection.manifest.cubins["launch_probe"]
    return collection.read(entries[f"sm{major}{minor}"])


def _name(params: list[Any]) -> str:
    return f"launch_probe_{len(params)}"


def _eager_rms_norm(rounds: int) -> list[ResultRow]:
    import torch

    from .. import ops

    x = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    peer = "torch.nn.functional.rms_norm"
    compiled = torch.compile(lambda a, w: torch.nn.functional.rms_norm(a, (4096,), w, 1e-6))
    with torch.no_grad():
        samples = interleave(
            {
                "kernel_hub.ops.rowwise.rms_norm": timed(lambda: ops.rms_norm(x, weight, 1e-6)),
                peer: timed(lambda: torch.nn.functional.rms_norm(x, (4096,), weight, 1e-6)),
                "torch.compile": timed(lambda: compiled(x, weight)),
            },
            rounds,
        )
    return summarise("launch", "eager rms_norm 4 x 4096 bf16", samples, "ns", ratio_to=peer)


def import_milliseconds(repeats: int = 15) -> list[ResultRow]:
    """What imports add to NumPy's own, and what the first launch of a process costs."""
    rows: list[ResultRow] = []
    for case, code in _STARTS.items():
        samples = {"kernel_hub": [_child(code) for _ in range(repeats)]}
        rows += summarise("start", case, samples, "ms", ratio_to="")
    return rows


_IMPORT = "import time, numpy; t = time.perf_counter(); "
_FIRST_LAUNCH = """
import time, torch
from kernel_hub import Kernel
x = torch.ones(1024, device="cuda"); torch.cuda.synchronize()
t = time.perf_counter()
Kernel("launch_probe").launch_probe_5((4, 1, 1), (256, 1, 1), 0, None, [x, x, x, 1024, 0.5])
"""


_STARTS = {
    "import kernel_hub after numpy": _IMPORT + "import kernel_hub",
    "from kernel_hub import Kernel after numpy": _IMPORT + "from kernel_hub import Kernel",
    "first launch of a shipped kernel": _FIRST_LAUNCH,
}


def _child(code: str) -> float:
    text = code + "\nprint((time.perf_counter() - t) * 1e3)"
    # An installed package has its bytecode; a checkout gets it at the first of these runs.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, env=environment
    )
    return float(done.stdout.split()[-1])


def median(rows: list[ResultRow], contender: str) -> float:
    """The median of `contender` among `rows`."""
    return statistics.median(row.median for row in rows if row.contender == contender)
