"""What `kernel-hub demo` runs on a GPU without torch: shipped kernels on NumPy's data.

The kernels are launched as any caller could: by name, with gridDim, blockDim and params.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import DeviceArray, Kernel, driver
from .rates import Result, Roofs

Array = NDArray[Any]
Inputs = dict[str, Array]
DTYPES: dict[str, Any] = {"fp16": np.float16, "fp32": np.float32}
_HIDDEN, _INTERMEDIATE = 4096, 14336
_L2_CACHE_SIZE = 38  # CUdevice_attribute
_MAX_SETS = 48
_SAMPLE_SECONDS = 0.02
_COPIED_BYTES = 256 << 20
# The reference is fp64: rows are checked this many at a time.
_CHECKED_ROWS = 256
# Units in the last place that a GPU's exp, division and square root may add to NumPy's error.
_FUNCTION_ULPS = 4


@dataclass(frozen=True)
class NumpyCase:
    """One kernel on one shape and dtype; `dtype` is the one of `out`.

    launch: (cubin, function, gridDim, blockDim, sharedMemBytes).
    params: what the kernel takes, from `out` and the inputs on the device.
    refer: rows of the result in a precision, from the inputs on the host.
    """

    op: str
    shape: str
    dtype: str
    num_bytes: int
    out_shape: tuple[int, int]
    launch: tuple[str, str, tuple[int, int, int], tuple[int, int, int], int]
    make: Callable[[np.random.Generator], Inputs]
    params: Callable[[DeviceArray, dict[str, DeviceArray]], list[Any]]
    refer: Callable[[Inputs, slice, Any], Array]
    num_flops: int = 0


def cases(num_tokens: int, compute_capability: tuple[int, int]) -> Iterator[NumpyCase]:
    """Kernels that read, that compute and that multiply, in the shapes of an 8B Llama."""
    yield _scale_and_add(num_tokens)
    for dtype in DTYPES:
        yield _rms_norm(num_tokens, dtype)
        yield _silu_and_mul(num_tokens, dtype)
    yield _weight_extraction()
    yield _matmul_512()
    yield _linear(min(num_tokens, 1024), compute_capability)


def _normal(random: np.random.Generator, dtype: str, *shape: int, scale: float = 1.0) -> Array:
    values = random.standard_normal(shape, dtype=np.float32)
    return (values * np.float32(scale)).astype(DTYPES[dtype], copy=False)


def _scale_and_add(num_tokens: int) -> NumpyCase:
    shape = (num_tokens, _HIDDEN)
    count = num_tokens * _HIDDEN

    def refer(i: Inputs, rows: slice, dtype: Any) -> Array:
        return i["x"][rows].astype(dtype) + dtype(0.5) * i["y"][rows].astype(dtype)

    return NumpyCase(
        "launch_probe_5: x + y / 2",
        f"{num_tokens} x {_HIDDEN}",
        "fp32",
        3 * 4 * count,
        shape,
        ("launch_probe", "launch_probe_5", (-(-count // 256), 1, 1), (256, 1, 1), 0),
        lambda random: {name: _normal(random, "fp32", *shape) for name in ("x", "y")},
        lambda out, i: [out, i["x"], i["y"], count, 0.5],
        refer,
    )


def _rms_norm(num_tokens: int, dtype: str) -> NumpyCase:
    shape, eps = (num_tokens, _HIDDEN), 1e-6
    vectors_a_thread = {"fp16": 2, "fp32": 4}[dtype]  # of 16 bytes; 256 threads cover a row

    def refer(i: Inputs, rows: slice, dtype: Any) -> Array:
        x = i["x"][rows].astype(dtype)
        mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.promote_types(dtype, np.float32))
        return (x / np.sqrt(mean + eps) * i["weight"].astype(dtype)).astype(dtype)

    return NumpyCase(
        "rms_norm",
        f"{num_tokens} x {_HIDDEN}",
        dtype,
        2 * num_tokens * _HIDDEN * np.dtype(DTYPES[dtype]).itemsize,
        shape,
        (
            "rms_norm",
            f"rms_norm_{dtype}_flat_vec{vectors_a_thread}",
            (num_tokens, 1, 1),
            (256, 1, 1),
            0,
        ),
        lambda random: {
            "x": _normal(random, dtype, *shape),
            "weight": _normal(random, dtype, _HIDDEN),
        },
        lambda out, i: [out, i["x"], i["weight"], num_tokens, _HIDDEN, eps, 0.0],
        refer,
    )


def _silu_and_mul(num_tokens: int, dtype: str) -> NumpyCase:
    itemsize = np.dtype(DTYPES[dtype]).itemsize
    blocks = _INTERMEDIATE * itemsize // (16 * 896)  # a thread takes 16 bytes

    def refer(i: Inputs, rows: slice, dtype: Any) -> Array:
        gate, up = np.split(i["x"][rows].astype(dtype), 2, axis=-1)
        return gate / (1 + np.exp(-gate)) * up

    return NumpyCase(
        "silu_and_mul",
        f"{num_tokens} x 2 x {_INTERMEDIATE}",
        dtype,
        3 * num_tokens * _INTERMEDIATE * itemsize,
        (num_tokens, _INTERMEDIATE),
        ("silu_and_mul", f"silu_and_mul_{dtype}_flat", (blocks, num_tokens, 1), (896, 1, 1), 0),
        lambda random: {"x": _normal(random, dtype, num_tokens, 2 * _INTERMEDIATE)},
        lambda out, i: [out, i["x"], _INTERMEDIATE],
        refer,
    )


def _weight_extraction() -> NumpyCase:
    shape = (_HIDDEN, _HIDDEN)

    def refer(i: Inputs, rows: slice, dtype: Any) -> Array:
        return i["weight"][rows].astype(dtype) * i["scale"][rows, None].astype(dtype)

    return NumpyCase(
        "int8WeightExtractionHalf",
        f"{_HIDDEN} x {_HIDDEN}",
        "fp16",
        3 * _HIDDEN * _HIDDEN,
        shape,
        ("weight_extraction", "int8WeightExtractionHalf", (_HIDDEN, 1, 1), (1024, 1, 1), 0),
        lambda random: {
            "weight": random.integers(-127, 128, shape, dtype=np.int8),
            "scale": _normal(random, "fp16", _HIDDEN, scale=0.01),
        },
        lambda out, i: [i["weight"], i["scale"], out, _HIDDEN, _HIDDEN],
        refer,
    )


def _matmul_512() -> NumpyCase:
    shape = (512, 512)

    def refer(i: Inputs, rows: slice, dtype: Any) -> Array:
        return i["a"][rows].astype(dtype) @ i["b"].astype(dtype)

    return NumpyCase(
        "matmul_cache_kernel",
        "512 x 512 x 512",
        "fp32",
        512 * 512 * (2 + 2 + 4),
        shape,
        ("matmul_cache_kernel", "matmul_cache_kernel_0d1d2d", (8, 8, 1), (32, 32, 1), 16384),
        lambda random: {name: _normal(random, "fp16", *shape) for name in ("a", "b")},
        lambda out, i: [i["a"], i["b"], out],
        refer,
        2 * 512**3,
    )


def _linear(m: int, compute_capability: tuple[int, int]) -> NumpyCase:
    """The product that every GPU since 8.0 runs (csrc/matmul/linear.cu), k not split."""
    n = k = _HIDDEN
    stages = 3 if compute_capability == (8, 9) else 4
    shared_bytes = stages * (128 + 128) * 32 * 2
    grid = (-(-m // 128) * (n // 128), 1, 1)

    def refer(i: Inputs, rows: slice, dtype: Any) -> Array:
        wide = np.promote_types(dtype, np.float32)  # NumPy multiplies fp16 one by one
        return (i["a"][rows].astype(wide) @ i["b"].astype(wide).T).astype(dtype)

    return NumpyCase(
        "linear",
        f"{m} x {n} x {k}",
        "fp16",
        2 * (m * k + n * k + m * n),
        (m, n),
        ("linear", "linear_fp16_128x128", grid, (128, 1, 1), shared_bytes),
        lambda random: {
            "a": _normal(random, "fp16", m, k),
            "b": _normal(random, "fp16", n, k, scale=k**-0.5),
        },
        lambda out, i: [
            *(out, None, None, i["a"], i["b"], None, None),
            *(n, k, k, n, m, n, k, 0),
        ],
        refer,
        2 * m * n * k,
    )


def compare(case: NumpyCase, out: Array, inputs: Inputs) -> Result:
    """Hold every element against NumPy in fp64; NumPy's own error in the dtype is the budget."""
    dtype = DTYPES[case.dtype]
    error = budget = largest = 0.0
    for start in range(0, len(out), _CHECKED_ROWS):
        rows = slice(start, start + _CHECKED_ROWS)
        truth = case.refer(inputs, rows, np.float64)
        own = case.refer(inputs, rows, dtype)
        found = out[rows].astype(np.float64)
        # A result that is no number is off by more than any limit.
        error = max(error, float(np.nan_to_num(np.abs(found - truth), nan=np.inf).max()))
        budget = max(budget, float(np.abs(own.astype(np.float64) - truth).max()))
        largest = max(largest, float(np.abs(truth).max()))
    limit = 2 * budget + _FUNCTION_ULPS * float(np.finfo(dtype).eps) * largest
    ok = bool(error <= limit)
    message = f"{case.op}: largest error {error:.3g}, limit {limit:.3g}"
    return Result(case.op, case.shape, case.dtype, ok, error, limit, message)


def measured(case: NumpyCase, random: np.random.Generator, roofs: Roofs) -> Result:
    """Launch on device 0, compare the first result, and time launches rotated past the L2."""
    cubin, name, grid, block, shared_bytes = case.launch
    function = Kernel(cubin)[name]
    inputs = case.make(random)
    launches, outs = [], []
    for _ in range(_num_sets(case.num_bytes)):
        arrays = {name: DeviceArray.from_numpy(array) for name, array in inputs.items()}
        outs.append(DeviceArray.zeros(case.out_shape, DTYPES[case.dtype]))
        params = case.params(outs[-1], arrays)
        launches.append(function.bind(grid, block, shared_bytes, None, params))
    launches[0]()
    result = compare(case, outs[0].to_numpy(), inputs)
    return roofs.rated(result, case.num_bytes, case.num_flops, time_us(launches))


def roofs() -> Roofs:
    """What this GPU copies; its matrix rate needs somebody else's product to be known."""
    pairs = [[DeviceArray.empty(_COPIED_BYTES, "int8") for _ in range(2)] for _ in range(2)]
    us = time_us([partial(target.copy_from, source) for target, source in pairs])
    return Roofs(2 * _COPIED_BYTES / us / 1e6, {})


def time_us(launches: Sequence[Callable[[], object]], rounds: int = 5) -> float:
    """Microseconds of one of `launches`, queued one behind the other on device 0; median of rounds.

    The host's clock from an idle GPU to an idle GPU: launches quicker than the host can queue them
    (3 to 4 us) read as that.
    """

    def run(count: int) -> float:
        started = time.perf_counter()
        for i in range(count):
            launches[i % len(launches)]()
        the_driver.call("cuCtxSynchronize")
        return time.perf_counter() - started

    the_driver = driver.get()
    with the_driver.on_device(0):
        run(len(launches))
        once = run(1)
        count = max(1, min(2000, int(_SAMPLE_SECONDS / once)))
        return 1e6 * statistics.median(run(count) / count for _ in range(rounds))


def _num_sets(bytes_a_launch: int) -> int:
    """How many input sets to rotate over: three times the L2, at most 48 of them."""
    l2_bytes = driver.get().attribute(0, _L2_CACHE_SIZE)
    return max(2, min(_MAX_SETS, -(-3 * l2_bytes // bytes_a_launch)))
