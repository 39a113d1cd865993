"""`doctor` on stand-in drivers: what is said, and the exit code."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_run import Run
from fakecuda import FakeCuda

from kernel_hub import DeviceArray, Kernel, driver, empty_pinned
from kernel_hub.cli import doctor
from kernel_hub.driver import prototypes
from kernel_hub.errors import CubinNotFoundError
from kernel_hub.launch import c_launcher

Make = Callable[..., FakeCuda]


def test_a_machine_that_can_launch(fakecuda: FakeCuda, kernel_hub_cli: Run) -> None:
    ran = kernel_hub_cli("doctor")
    assert ran.code == 0, ran.out
    assert ran.out.endswith("launches are possible\n")
    assert f"({fakecuda.path})" in ran.out  # the file behind the name
    assert f"{driver.LIBRARY_VARIABLE} names it" in ran.out
    assert "sm90/launch_probe.cubin" in ran.out


def test_json_holds_the_same(fakecuda: FakeCuda, kernel_hub_cli: Run) -> None:
    report = json.loads(kernel_hub_cli("doctor", "--json").out)
    assert report["can_launch"] is True
    assert report["driver"]["version"] == 13000
    assert report["devices"][0]["compute_capability"] == [9, 0]
    assert report["devices"][0]["cubins"]["launch_probe"] == "sm90/launch_probe.cubin"
    assert report["cubins"]["minimum_driver"] <= 13000


def test_each_device_takes_its_own(make_fakecuda: Make) -> None:
    make_fakecuda(devices=2).set_capability(1, 8, 6)
    devices = doctor.examine().devices
    files = [device.cubins["launch_probe"] for device in devices]
    assert files == ["sm90/launch_probe.cubin", "sm80/launch_probe.cubin"]


def test_no_driver(no_driver: None, kernel_hub_cli: Run) -> None:
    ran = kernel_hub_cli("doctor")
    assert ran.code == 1
    assert "no CUDA driver library could be loaded" in ran.out
    assert "/nowhere/libcuda.so.1" in ran.out
    assert ran.out.endswith("no launch is possible here\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": 12090}, "the driver is of CUDA 12.9, the shipped cubins need 13.0"),
        ({"devices": 0}, "the driver sees no GPU"),
        ({"capability": (6, 1)}, "./build_cubins.sh --arch sm61"),
    ],
)
def test_what_is_wrong_is_said(
    make_fakecuda: Make, kernel_hub_cli: Run, options: dict[str, Any], message: str
) -> None:
    make_fakecuda(**options)
    ran = kernel_hub_cli("doctor")
    assert ran.code == 1 and message in ran.out


def test_a_device_that_gives_no_context(fakecuda: FakeCuda, kernel_hub_cli: Run) -> None:
    fakecuda.fail("cuDevicePrimaryCtxRetain", 46)
    ran = kernel_hub_cli("doctor")
    assert ran.code == 1 and "CUDA_ERROR_DEVICE_UNAVAILABLE" in ran.out


def test_cuinit_fails(fakecuda: FakeCuda, kernel_hub_cli: Run) -> None:
    fakecuda.set_init_code(34)
    ran = kernel_hub_cli("doctor")
    assert ran.code == 1 and "CUDA_ERROR_STUB_LIBRARY" in ran.out


def test_no_cubins(fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CubinNotFoundError("package 'kernel_hub' ships no cubins")

    monkeypatch.setattr(doctor, "open_collection", missing)
    report = doctor.examine()
    assert not report.can_launch
    assert "package 'kernel_hub' ships no cubins" in report.problems


def test_an_older_driver_lacks_calls(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, kernel_hub_cli: Run
) -> None:
    monkeypatch.setattr(driver.Driver, "has", lambda self, name: name != "cuFuncLoad")
    ran = kernel_hub_cli("doctor")
    assert ran.code == 0
    assert "note: the driver has no cuFuncLoad (CUDA 12.4)" in ran.out


def test_every_optional_call_is_explained() -> None:
    assert set(doctor.OPTIONAL_CALLS) == set(prototypes.OPTIONAL)


@pytest.mark.parametrize(("on", "shown"), [(True, "the C"), (False, "the Python")])
def test_which_launcher(
    kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch, on: bool, shown: str
) -> None:
    monkeypatch.setattr(c_launcher, "available", lambda: on)
    assert f"launcher    {shown} launcher takes" in kernel_hub_cli("doctor").out


def test_without_torch(
    fakecuda: FakeCuda, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )
    ran = kernel_hub_cli("doctor")
    assert ran.code == 0 and "note: torch is not installed" in ran.out


def test_why_a_library() -> None:
    names = ["libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"]
    assert doctor.why(names[0], names) == "the first name that is tried"
    assert doctor.why(names[1], names) == "loaded because libcuda.so.1 could not be"
    assert "KERNEL_HUB_LIBCUDA" in doctor.why("/x.so", ["/x.so"])


def test_the_loaded_file_is_read_from_the_map(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/python3\n"
        "7f00-7f01 r-xp 00000000 08:02 17 /usr/lib/libcuda.so.580.1\n"
        "7f01-7f02 rw-p 00000000 00:00 0\n"
        "7f02-7f03 r-xp 00000000 08:02 18 /opt/libcuda.so.1\n"
    )
    assert doctor.loaded_file("/opt/libcuda.so.1", maps) == "/opt/libcuda.so.1"
    assert doctor.loaded_file("libcuda.so.1", maps) == "/usr/lib/libcuda.so.580.1"
    assert doctor.loaded_file("libcuda.so.1", tmp_path / "none") is None


def test_a_cache_folder_that_is_not_used(
    fakecuda: FakeCuda, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/ptx").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("KERNEL_HUB_CACHE", str(tmp_path / "cache"))
    ran = kernel_hub_cli("doctor")
    assert ran.code == 0
    assert f"note: the cache folder {tmp_path / 'cache'} is not used" in ran.out
    assert json.loads(kernel_hub_cli("doctor", "--json").out)["cache"]["problem"]
    monkeypatch.setenv("KERNEL_HUB_CACHE", "0")
    assert json.loads(kernel_hub_cli("doctor", "--json").out)["cache"]["folder"] == "off"


def test_loaded_images_and_why(fakecuda: FakeCuda, kernel_hub_cli: Run) -> None:
    assert not doctor.examine().loaded
    kernel = Kernel("launch_probe")
    kernel.launch_probe_5.load()
    (loaded,) = doctor.examine().loaded
    assert loaded["num_kernels"] == 1 and loaded["why"] == "in use"
    assert "launch_probe" in kernel_hub_cli("doctor").out
    del kernel
    (loaded,) = doctor.examine().loaded
    assert loaded["num_kernels"] == 0 and "shipped" in loaded["why"]


def test_why_the_c_launcher_is_not_used(
    fakecuda: FakeCuda, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(c_launcher.VARIABLE, "0")
    assert "note: the C launcher is not used: KERNEL_HUB_NATIVE=0" in kernel_hub_cli("doctor").out


def test_memory_pools(make_fakecuda: Make, kernel_hub_cli: Run) -> None:
    fake = make_fakecuda(devices=2)
    assert doctor.examine().pools == []
    kept = DeviceArray.zeros(1000, device=1)
    pinned = empty_pinned(250, device=1)
    ran = kernel_hub_cli("doctor", "--json")
    (found,) = json.loads(ran.out)["pools"]
    assert (found["device"], found["live_arrays"], found["pinned_host_bytes"]) == (1, 1, 1000)
    assert found["unused_bytes"] == found["reserved_bytes"] - found["used_bytes"]
    out = kernel_hub_cli("doctor").out
    assert "memory pool" in out and f"{found['reserved_bytes']:,}" in out
    fake.fail("cuMemPoolGetAttribute", 700)
    ran = kernel_hub_cli("doctor")
    assert ran.code == 1 and "CUDA_ERROR_ILLEGAL_ADDRESS" in ran.out
    del kept, pinned
