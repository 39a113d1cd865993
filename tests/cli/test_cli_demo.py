"""`demo` on the CPU, on a stand-in driver without torch's help, and what it says of each."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cli_run import ROOT, Run
from fakecuda import FakeCuda
from skips import alone

from kernel_hub import Kernel
from kernel_hub.cli import demo
from kernel_hub.collection.manifest import open_collection
from kernel_hub.measure import demo_numpy, torch_builds
from kernel_hub.measure.rates import Result, Roofs

NUM_CASES = 20
NUM_NUMPY_CASES = 8


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few launches to time and little to copy where no GPU has caches that they had to outgrow."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(demo_numpy, "_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(demo_numpy, "_MAX_SETS", 2)
    monkeypatch.setattr(demo_numpy, "_COPIED_BYTES", 1 << 20)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


def read(types: list[str], addresses: list[int]) -> list[int | float]:
    """The values of parameters that lie at `addresses`."""
    codes = {"int": "i", "float": "f", "int64_t": "q"}
    letters = ["Q" if kind.endswith("*") else codes[kind] for kind in types]
    sizes = map(struct.calcsize, letters)
    pairs = zip(letters, sizes, addresses, strict=True)
    return [struct.unpack(a, ctypes.string_at(at, size))[0] for a, size, at in pairs]


def multiply(
    grid: object, block: object, shared: int, *, params: list[int], cluster: object
) -> None:
    """matmul_cache_kernel_0d1d2d; the emulator does not take its shared memory's declaration."""
    kinds = (ctypes.c_uint16, ctypes.c_uint16, ctypes.c_float)
    a, b, c = (
        np.ctypeslib.as_array((kind * 512**2).from_address(at)).reshape(512, 512)
        for kind, at in zip(kinds, params, strict=True)
    )
    c[:] = a.view(np.float16).astype(np.float32) @ b.view(np.float16).astype(np.float32)


@pytest.fixture
def emulated_gpu(
    torch: Any, make_fakecuda: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch
) -> FakeCuda:
    """A stand-in driver whose GPU runs the source of the kernels that the demo launches."""
    monkeypatch.syspath_prepend(ROOT / "tests/ops")
    from emulated import CannotEmulateError, EmulatedFunction

    fake = make_fakecuda()
    monkeypatch.setattr(demo_numpy, "_HIDDEN", 128)
    monkeypatch.setattr(demo_numpy, "_INTERMEDIATE", 7168)

    def run_by(function: Callable[..., None], types: list[str]) -> Any:
        def run(launch: Any, addresses: list[int]) -> None:
            grid, block, shared = launch.gridDim, launch.blockDim, launch.sharedMemBytes
            function(list(grid), list(block), shared, params=read(types, addresses), cluster=())

        return run

    for case in demo_numpy.cases(1, (9, 0)):
        cubin, name = case.launch[:2]
        try:
            # What the launch took has been checked: these are the bytes it passed on.
            function = multiply if "matmul" in cubin else EmulatedFunction(cubin, name).run
        except CannotEmulateError as missing:
            pytest.skip(str(missing))
        types = [param.type or "" for param in Kernel(cubin)[name]._spec.params or ()]
        fake.set_callback(name, run_by(function, types))
    return fake


def test_without_a_gpu_the_ops_run_on_the_cpu(
    torch: Any, no_driver: None, kernel_hub_cli: Run
) -> None:
    ran = kernel_hub_cli("demo", "--tokens", "3")
    assert ran.code == 0
    assert "ops on the CPU (the reference path)" in ran.out
    assert "no kernel was launched: no CUDA driver library could be loaded" in ran.out
    assert f"{NUM_CASES} of {NUM_CASES} ops are right on the CPU" in ran.out
    table, _, named = ran.out.partition("\ncubin ")[2].partition("\n8.0: A100; ")
    assert max(map(len, table.splitlines())) <= 80 and "9.0: H100, H200;" in named
    assert ran.err.count("ops on cpu") == NUM_CASES


def test_json(torch: Any, no_driver: None, kernel_hub_cli: Run) -> None:
    report = json.loads(kernel_hub_cli("demo", "--tokens", "2", "--json").out)
    assert (report["ok"], report["device"]) == (True, "cpu")
    assert len(report["words"].split()) > 1 and report["words"].replace(" ", "").isalpha()
    assert len(report["ops"]) == NUM_CASES
    for row in report["ops"]:
        assert row["ok"] and row["error"] <= row["limit"] and row["time_us"] is None


def test_a_wrong_op_fails(
    torch: Any, no_driver: None, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernel_hub.measure import demo as cases

    monkeypatch.setattr(cases.ops, "silu_and_mul", lambda x: x[..., ::2].clone())
    ran = kernel_hub_cli("demo", "--tokens", "2")
    assert ran.code == 1
    assert ran.out.count("FAILED") == 3
    assert "17 of 20 ops are right" in ran.out


def test_every_row_is_checked(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_hub.measure import demo as cases

    monkeypatch.setattr(cases, "_CHECKED_ROWS", 8)
    case = next(cases.cases("cpu", 2 * cases._CHECKED_ROWS + 1))
    inputs = case.make()
    (out,) = case.run(inputs)
    for row, is_right in ((None, True), (0, False), (cases._CHECKED_ROWS, False), (-1, False)):
        changed = out.clone()
        if row is not None:
            changed[row, 7] = 1000
        broken = replace(case, run=lambda _, changed=changed: (changed,))
        assert cases.checked(broken, inputs).ok is is_right


def test_without_torch_the_gpu_runs_kernels_on_numpy_data(
    emulated_gpu: FakeCuda, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "no_torch", lambda: "torch is not installed")
    ran = kernel_hub_cli("demo", "--tokens", "3")
    assert ran.code == 0, ran.out
    assert f"{NUM_NUMPY_CASES} of {NUM_NUMPY_CASES} kernels are right on" in ran.out
    assert "the ops did not run: torch is not installed" in ran.out
    assert ran.out.count(" ok ") == NUM_NUMPY_CASES
    # It ends with the one command that goes further, and what that costs.
    *_, cost, command = ran.out.splitlines()
    assert "CUDA 13.0" in cost and "GB to download" in cost and "are free" in cost
    assert command == "  make demo TORCH=cuda"


@pytest.mark.parametrize("index", range(NUM_NUMPY_CASES))
def test_a_kernel_that_is_off_anywhere_is_wrong(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_numpy, "_HIDDEN", 256)
    case = list(demo_numpy.cases(20, (9, 0)))[index]
    monkeypatch.setattr(demo_numpy, "_CHECKED_ROWS", case.out_shape[0] // 3)
    inputs = case.make(np.random.default_rng(7))
    dtype = demo_numpy.DTYPES[case.dtype]
    rows = slice(0, case.out_shape[0])
    right = case.refer(inputs, rows, np.float64).astype(dtype)
    assert right.shape == case.out_shape
    assert demo_numpy.compare(case, right, inputs).ok
    for row in (0, demo_numpy._CHECKED_ROWS, -1):
        for value in (np.nan, np.inf, right[row, -1] + dtype(0.1) * abs(right).max()):
            wrong = right.copy()
            wrong[row, -1] = value
            assert not demo_numpy.compare(case, wrong, inputs).ok


def test_kernels_that_do_nothing_are_wrong(
    fakecuda: FakeCuda, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = kernel_hub_cli("demo", "--numpy", "--tokens", "2", "--json")
    report = json.loads(ran.out)
    assert (ran.code, report["ok"], report["no_torch"]) == (1, False, "left out")
    assert [row["ok"] for row in report["numpy"]] == [False] * NUM_NUMPY_CASES


def test_a_cpu_build_of_torch_beside_a_gpu(
    emulated_gpu: FakeCuda, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_torch_has_cuda", lambda: False)
    ran = kernel_hub_cli("demo", "--tokens", "1")
    assert ran.code == 0, ran.out
    assert f"{NUM_NUMPY_CASES} of {NUM_NUMPY_CASES} kernels are right on" in ran.out
    assert f"{NUM_CASES} of {NUM_CASES} ops are right on the CPU" in ran.out
    assert ran.out.endswith("  make demo TORCH=cuda\n")


def test_where_nothing_runs_it_fails(
    no_driver: None, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "no_torch", lambda: "torch is not installed")
    ran = kernel_hub_cli("demo")
    assert ran.code == 1
    assert "FAILED: nothing ran" in ran.out and "make demo TORCH=cpu" in ran.out
    ran = kernel_hub_cli("demo", "--json")
    report = json.loads(ran.out)
    assert (ran.code, report["ok"], report["ops"], report["numpy"]) == (1, False, [], [])


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError, ValueError, AttributeError])
def test_a_torch_that_does_not_import_is_named(
    torch: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def broken(name: str) -> Any:
        raise error("numpy.dtype size changed")

    monkeypatch.setattr(demo.importlib, "import_module", broken)
    assert demo.no_torch() == "torch does not import: numpy.dtype size changed"


def test_a_gpu_that_nothing_is_shipped_for_is_a_problem(
    make_fakecuda: Callable[..., FakeCuda], kernel_hub_cli: Run
) -> None:
    make_fakecuda(capability=(7, 0))
    ran = kernel_hub_cli("demo", "--numpy", "--json")
    report = json.loads(ran.out)
    assert (ran.code, report["ok"], len(report["problems"])) == (1, False, 1)
    assert "7.0" in report["problems"][0]


def test_outside_a_checkout_the_way_on_is_pips(
    make_fakecuda: Callable[..., FakeCuda],
    kernel_hub_cli: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    make_fakecuda(version=13020)
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "no_torch", lambda: "torch is not installed")
    out = kernel_hub_cli("demo", "--tokens", "2").out
    assert out.endswith("  pip install torch --index-url https://download.pytorch.org/whl/cu130\n")


def test_a_driver_that_is_too_old_is_not_told_to_fetch_torch(
    make_fakecuda: Callable[..., FakeCuda],
    kernel_hub_cli: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_fakecuda(version=12080)
    monkeypatch.setattr(demo, "no_torch", lambda: "torch is not installed")
    ran = kernel_hub_cli("demo", "--tokens", "2")
    assert ran.code == 1
    assert "needs a driver of CUDA 13.0" in ran.out and "TORCH=cuda" not in ran.out


@pytest.mark.parametrize(
    ("version", "cuda"),
    [(13020, "13.0"), (13000, "13.0"), (12090, "12.8"), (12040, "12.6"), (11080, None)],
)
def test_the_build_follows_the_driver(version: int, cuda: str | None) -> None:
    build = torch_builds.build_for(version)
    assert (build.cuda if build else None) == cuda


ONE = Result("op", "1 x 1", "fp16", True, 0.0, 1.0, "op: right")


@pytest.mark.parametrize(
    ("flops_a_byte", "matrix", "shown"),
    [
        (0, {"fp16": 800.0}, ("2.00 TB/s", "50% copy")),
        (1, {"fp16": 800.0}, ("2.00 TB/s", "50% copy")),
        (300, {"fp16": 800.0}, ("600 TFLOP/s", "75% matmul")),
        (300, {"bf16": 800.0}, ("600 TFLOP/s", "")),  # no roof of its dtype
        (99, {}, ("2.00 TB/s", "50% copy")),
    ],
)
def test_an_op_is_rated_by_the_roof_it_is_nearer_to(
    flops_a_byte: int, matrix: dict[str, float], shown: tuple[str, str]
) -> None:
    num_bytes = 200_000_000
    rated = Roofs(4.0, matrix).rated(ONE, num_bytes, flops_a_byte * num_bytes, 100.0)
    assert demo._rate(rated) == shown
    assert rated.share_of_copy == 0.5 and rated.time_us == 100.0


def test_compute_bound_cases_say_their_operations(torch: Any) -> None:
    from kernel_hub.measure import demo as cases

    by_op = {case.op: case for case in cases.cases("cuda", 8192) if case.dtype == "bf16"}
    assert by_op["linear + residual"].num_flops == 2 * 8192 * 4096 * 4096
    assert by_op["swiglu_linear"].num_flops == 4 * 8192 * 4096 * 14336
    causal = by_op["flash_attention, causal"].num_flops  # 8 sequences, both products
    assert causal == 8 * 32 * 4 * 128 * (1024 * 1025 // 2)
    assert not by_op["rms_norm"].num_flops
    # On a card of 4 TB/s and 800 TFLOP/s these are the ones that the matrix units bound.
    roofs, result = Roofs(4.0, {"bf16": 800.0}), replace(ONE, dtype="bf16")
    rated = {
        op: roofs.rated(result, case.num_bytes, case.num_flops, 100.0) for op, case in by_op.items()
    }
    by_matrix = {op for op, one in rated.items() if one.bound == "matrix"}
    assert by_matrix == {"linear + residual", "swiglu_linear", "flash_attention, causal"}


def test_the_roofs_are_measured_beside_the_op(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that others slowed while its rates were measured first makes no op too quick."""
    from kernel_hub.measure import demo as cases

    class Timer:
        """Both take what they would alone, as others have gone."""

        def measure(self, contenders: dict[str, Any], bytes_a_launch: int) -> dict[str, Any]:
            assert len({len(launches) for launches in contenders.values()}) == 1
            return {name: [us[name]] * 3 for name in contenders}

    monkeypatch.setattr(cases, "matrix_products", lambda dtype, count: [None] * count)
    monkeypatch.setattr(cases, "num_sets", lambda num_bytes: 2)
    monkeypatch.setattr(cases, "_copied", lambda: 4.0)
    case = next(c for c in cases.cases("cpu", 16) if c.op.startswith("linear"))
    us = {"matmul": 2 * cases.MATRIX_SIZE**3 / 800e6, case.op: case.num_flops / 600e6}
    found = cases.measured(case, Timer(), Roofs(1.0, {"fp16": 300.0}))
    assert found.share_of_matrix == pytest.approx(0.75)
    assert found.share_of_copy == pytest.approx(case.num_bytes / us[case.op] / 4e6)


def test_the_resolver_table_names_the_right_cubins() -> None:
    for name, *archs in demo.resolver_rows():
        assert archs[-1] == "-"
        if not name.endswith("_sm90"):
            ada = "sm89" if "sm89" in open_collection().manifest.cubins[name] else "sm80"
            assert archs[:4] == ["sm80", "sm80", ada, "sm90"]


@pytest.mark.gpu
@alone
def test_on_a_gpu(torch: Any, kernel_hub_cli: Run) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    ran = kernel_hub_cli("demo", "--tokens", "8192", "--json")
    assert ran.code == 0, (ran.out[:2000], ran.err[-2000:])
    report = json.loads(ran.out)
    assert (report["ok"], report["device"]) == (True, "cuda")
    for row in report["ops"]:
        assert row["time_us"] > 0, row
        assert 0 < row[f"share_of_{row['bound']}"] < 1.5, row
    by_matrix = {row["op"] for row in report["ops"] if row["bound"] == "matrix"}
    assert {"linear + residual", "swiglu_linear", "flash_attention, causal"} == by_matrix


@pytest.mark.gpu
@alone
def test_numpy_on_a_gpu(kernel_hub_cli: Run) -> None:
    report = json.loads(kernel_hub_cli("demo", "--numpy", "--json").out)
    assert (report["ok"], report["device"]) == (True, "cuda")
    assert len(report["numpy"]) == NUM_NUMPY_CASES
    assert all(row["time_us"] > 0 and 0 < row["share_of_copy"] < 2 for row in report["numpy"])
