"""`demo` on the CPU, on a stand-in driver without torch's help, and what it says of each."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import numpy as np
import pytest
from cli_run import Run
from fakecuda import FakeCuda

from kernel_hub.cli import demo

NUM_CASES = 20


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


def run_probe(launch: Any, params: list[int]) -> None:
    """launch_probe_5 on the stand-in, whose device memory is the host's."""
    out, x, y = (ctypes.c_void_p.from_address(address).value for address in params[:3])
    count = ctypes.c_int.from_address(params[3]).value
    scale = ctypes.c_float.from_address(params[4]).value
    kind = ctypes.c_float * count
    result, first, second = (
        np.ctypeslib.as_array(kind.from_address(pointer or 0)) for pointer in (out, x, y)
    )
    result[:] = first + np.float32(scale) * second


def test_without_a_gpu_the_ops_run_on_the_cpu(
    torch: Any, no_driver: None, kernel_hub_cli: Run
) -> None:
    ran = kernel_hub_cli("demo", "--tokens", "3")
    assert ran.code == 0
    assert "ops on the CPU (the reference path)" in ran.out
    assert "no kernel was launched: no CUDA driver library could be loaded" in ran.out
    assert f"{NUM_CASES} of {NUM_CASES} ops are right on the CPU" in ran.out
    assert "9.0 (H100, H200)" in ran.out
    assert ran.err.count("ops on cpu") == NUM_CASES


def test_json(torch: Any, no_driver: None, kernel_hub_cli: Run) -> None:
    report = json.loads(kernel_hub_cli("demo", "--tokens", "2", "--json").out)
    assert (report["ok"], report["device"]) == (True, "cpu")
    assert len(report["ops"]) == NUM_CASES
    for row in report["ops"]:
        assert row["ok"] and row["error"] <= row["limit"] and row["time_us"] is None


def test_a_wrong_op_fails(
    torch: Any, no_driver: None, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernel_hub.testing import demo as cases

    monkeypatch.setattr(cases.ops, "silu_and_mul", lambda x: x[..., ::2].clone())
    ran = kernel_hub_cli("demo", "--tokens", "2")
    assert ran.code == 1
    assert ran.out.count("FAILED") == 3
    assert "17 of 20 ops are right" in ran.out


def test_every_row_is_checked(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_hub.testing import demo as cases

    monkeypatch.setattr(cases, "_CHECKED_ROWS", 8)
    case = next(cases.cases("cpu", 2 * cases._CHECKED_ROWS + 1))
    inputs = case.make()
    (out,) = case.run(inputs)
    for row, is_right in ((None, True), (0, False), (cases._CHECKED_ROWS, False), (-1, False)):
        changed = out.clone()
        if row is not None:
            changed[row, 7] = 1000
        broken = cases.replace(case, run=lambda _, changed=changed: (changed,))
        assert cases.checked(broken, inputs).ok is is_right


def test_without_torch_numpy_data_is_launched(
    fakecuda: FakeCuda, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakecuda.set_callback("launch_probe_5", run_probe)
    monkeypatch.setattr(demo, "no_torch", lambda: "torch is not installed")
    ran = kernel_hub_cli("demo")
    assert ran.code == 0, ran.out
    assert fakecuda.launch_count == 1
    assert "the ops did not run: torch is not installed" in ran.out
    assert "launch_probe_5 ran on" in ran.out


def test_a_wrong_launch_fails(
    fakecuda: FakeCuda, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "no_torch", lambda: "torch is not installed")
    assert kernel_hub_cli("demo").code == 1  # the stand-in runs nothing: zeros


def test_a_cpu_build_of_torch_beside_a_gpu(
    torch: Any, fakecuda: FakeCuda, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakecuda.set_callback("launch_probe_5", run_probe)
    monkeypatch.setattr(demo, "_torch_has_cuda", lambda: False)
    ran = kernel_hub_cli("demo", "--tokens", "1")
    assert ran.code == 0
    assert "they need a torch with CUDA" in ran.out


def test_the_resolver_table_names_the_right_cubins() -> None:
    for name, *archs in demo.resolver_rows():
        assert archs[-1] == "-"
        if not name.endswith("_sm90"):
            assert archs[:4] == ["sm80", "sm80", "sm89", "sm90"]


@pytest.mark.gpu
def test_on_a_gpu(torch: Any, kernel_hub_cli: Run) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    report = json.loads(kernel_hub_cli("demo", "--tokens", "1024", "--json").out)
    assert (report["ok"], report["device"]) == (True, "cuda")
    assert all(row["time_us"] > 0 and 0 < row["share_of_copy"] < 2 for row in report["ops"])


@pytest.mark.gpu
def test_numpy_on_a_gpu() -> None:
    assert demo.numpy_launch() <= 1e-6
