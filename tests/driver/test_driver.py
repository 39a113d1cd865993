"""driver.py against the stand-in: absent, stub, too old, no device, errors, contexts, fork."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from ctypes import byref, c_int
from pathlib import Path

import pytest
from fakecuda import FakeCuda, build
from fakecuda.helpers import make_stream
from in_threads import in_threads

from kernel_hub import Kernel, driver
from kernel_hub.driver import prototypes
from kernel_hub.driver.cuda_results import RESULTS, STICKY
from kernel_hub.errors import (
    CudaDriverError,
    DeviceOutOfMemoryError,
    DriverNotFoundError,
    FunctionNotFoundError,
)

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[..., FakeCuda]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No driver opened yet; the process's own comes back afterwards."""
    monkeypatch.setattr(driver.library, "_driver", None)
    return monkeypatch


def test_the_stand_in_has_every_function(fakecuda: FakeCuda) -> None:
    drv = driver.get()
    missing = [name for name in (*prototypes.REQUIRED, *prototypes.OPTIONAL) if not drv.has(name)]
    assert not missing
    assert driver.get() is drv
    assert drv.path == fakecuda.path


def test_a_function_is_found_when_it_is_asked_for(fakecuda: FakeCuda) -> None:
    drv = driver.get()
    assert drv.has("cuEventCreate") and "cuEventCreate" not in drv._functions
    assert drv.try_call("cuEventCreate", None, 0) != 0  # typed: None is a null pointer
    assert "cuEventCreate" in drv._functions and len(drv._functions) < 12
    assert not drv.has("cuNothing")


def test_nothing_is_asked_of_a_driver_that_nobody_calls() -> None:
    package = Path(driver.__file__).parent.parent
    text = "".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    names = (*prototypes.REQUIRED, *prototypes.OPTIONAL)
    assert [name for name in names if text.count(f'"{name}"') < 2] == []  # its prototype is one


# ---- no usable driver ----


def test_absent(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = str(tmp_path / "libcuda.so.1")
    fresh.setenv(driver.LIBRARY_VARIABLE, path)
    with pytest.raises(DriverNotFoundError) as caught:
        driver.get()
    text = str(caught.value)
    assert path in text
    assert "No such file" in text or "cannot open" in text  # the loader's own words
    assert "Install the NVIDIA driver" in text
    assert caught.value.tried == (path,)
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, RuntimeError)


def test_not_a_library(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(b"not a library")
    fresh.setenv(driver.LIBRARY_VARIABLE, str(path))
    with pytest.raises(DriverNotFoundError, match=r"libcuda\.so\.1: .*(ELF|header|short)"):
        driver.get()


def test_every_name_tried_is_listed(fresh: pytest.MonkeyPatch) -> None:
    fresh.delenv(driver.LIBRARY_VARIABLE, raising=False)
    fresh.setattr(driver.library, "candidates", lambda: ["libnone1.so", "libnone2.so"])
    with pytest.raises(DriverNotFoundError) as caught:
        driver.get()
    assert caught.value.tried == ("libnone1.so", "libnone2.so")
    assert all(name in str(caught.value) for name in caught.value.tried)


def test_macos_has_none(fresh: pytest.MonkeyPatch) -> None:
    fresh.delenv(driver.LIBRARY_VARIABLE, raising=False)
    fresh.setattr(sys, "platform", "darwin")
    with pytest.raises(DriverNotFoundError, match="macOS"):
        driver.get()


def test_names_by_platform(fresh: pytest.MonkeyPatch) -> None:
    fresh.delenv(driver.LIBRARY_VARIABLE, raising=False)
    fresh.setattr(sys, "platform", "linux")
    assert driver.candidates()[0] == "libcuda.so.1"
    fresh.setattr(sys, "platform", "win32")
    assert driver.candidates() == ["nvcuda.dll"]
    fresh.setenv(driver.LIBRARY_VARIABLE, "/x/libcuda.so")
    assert driver.candidates() == ["/x/libcuda.so"]


def test_stub(make_fakecuda: Make) -> None:
    fake = make_fakecuda()
    fake.set_init_code(34)
    with pytest.raises(DriverNotFoundError, match=r"CUDA_ERROR_STUB_LIBRARY.*link-time stub"):
        driver.get()


def test_the_toolkits_own_stub(fresh: pytest.MonkeyPatch) -> None:
    stubs = sorted(Path("/usr/local").glob("cuda*/lib64/stubs/libcuda.so"))
    if not stubs:
        pytest.skip("no CUDA toolkit with a libcuda stub under /usr/local")
    fresh.setenv(driver.LIBRARY_VARIABLE, str(stubs[0]))
    with pytest.raises(DriverNotFoundError, match="CUDA_ERROR_STUB_LIBRARY"):
        driver.get()


def test_too_old_to_have_libraries(make_fakecuda: Make) -> None:
    make_fakecuda(defines=("FAKECUDA_OLD",))
    with pytest.raises(DriverNotFoundError, match=r"has no cuLibrary\w+: .*12\.0 or later"):
        driver.get()


def test_without_the_newer_calls(make_fakecuda: Make) -> None:
    fake = make_fakecuda(version=12000, defines=("FAKECUDA_NO_OPTIONAL",))
    drv = driver.get()
    assert drv.version == 12000
    assert not any(drv.has(name) for name in prototypes.OPTIONAL)
    assert drv.take_log() == ""
    fake.fail("cuCtxGetCurrent", 1)
    with pytest.raises(CudaDriverError) as caught:
        drv.current_context()
    assert "driver log" not in str(caught.value)


def test_no_device(make_fakecuda: Make) -> None:
    make_fakecuda(devices=0)
    with pytest.raises(CudaDriverError, match=r"CUDA_ERROR_NO_DEVICE \(100\): .*nvidia-smi") as e:
        driver.get()
    assert (e.value.call, e.value.code, e.value.name) == ("cuInit", 100, "CUDA_ERROR_NO_DEVICE")


def test_a_failed_start_is_tried_again(make_fakecuda: Make) -> None:
    fake = make_fakecuda()
    fake.fail("cuInit", 999)
    with pytest.raises(CudaDriverError, match="cuInit failed: CUDA_ERROR_UNKNOWN"):
        driver.get()
    assert driver.get().device_count == 1


# ---- errors ----


@pytest.mark.parametrize("code", sorted(RESULTS))
def test_every_result(fakecuda: FakeCuda, code: int) -> None:
    drv = driver.get()
    name, meaning = RESULTS[code]
    fakecuda.fail("cuCtxSynchronize", code)
    with pytest.raises(CudaDriverError) as caught:
        drv.call("cuCtxSynchronize", asked="waiting for a test")
    error = caught.value
    assert (error.call, error.code, error.name) == ("cuCtxSynchronize", code, name)
    first, *rest = str(error).splitlines()
    assert first == f"cuCtxSynchronize failed: {name} ({code}): {meaning}"
    assert rest[0] == "  waiting for a test"
    assert isinstance(error, DeviceOutOfMemoryError) == (code == 2)
    assert ("This error is sticky" in str(error)) == (code in STICKY)
    if code in STICKY:
        assert "KERNEL_HUB_LAUNCH_BLOCKING=1" in str(error)


def test_unknown_results(fakecuda: FakeCuda) -> None:
    drv = driver.get()
    assert drv.error("cuX", 226).name == "CUDA_ERROR_FAKE_226"  # the driver knows the name
    assert str(drv.error("cuX", 12345)) == "cuX failed: CUresult 12345 (12345)"


def test_log_of_the_driver_is_in_the_error(fakecuda: FakeCuda) -> None:
    fakecuda.log("[from before]")
    drv = driver.get()
    fakecuda.log("[cuFoo] the value 7 is too large")
    text = str(drv.error("cuFoo", 1))
    assert "driver log: [cuFoo] the value 7 is too large" in text
    assert "from before" not in text
    assert "driver log" not in str(drv.error("cuFoo", 1))  # told once


def test_a_function_that_is_missing_leaves_the_log_unread(fakecuda: FakeCuda) -> None:
    # A dump after a long run of a driver of CUDA 13.0 ended the process (docs/notes/launch.md).
    Kernel("launch_probe", ["launch_probe_5"]).launch_probe_5.load()
    fakecuda.log("[another's] failure")
    fakecuda.fail("cuLibraryGetKernel", 500)
    other = Kernel("launch_probe", ["launch_probe_12"])
    with pytest.raises(FunctionNotFoundError, match="launch_probe_12"):
        other.launch_probe_12.load()
    assert fakecuda.calls("cuLogsDumpToMemory") == 0
    assert "driver log" not in str(driver.get().error("cuFoo", 1))


def test_log_that_fails_is_left_out(fakecuda: FakeCuda) -> None:
    drv = driver.get()
    fakecuda.fail("cuLogsDumpToMemory", 801)
    assert "driver log" not in str(drv.error("cuFoo", 1))


# ---- contexts, devices, streams ----


def test_devices(make_fakecuda: Make) -> None:
    fake = make_fakecuda(devices=3)
    fake.set_capability(1, 8, 9)
    drv = driver.get()
    assert drv.device_count == 3
    assert [drv.compute_capability(d) for d in range(3)] == [(9, 0), (8, 9), (9, 0)]
    assert drv.device_name(2) == "Fake GPU 2"
    assert drv.attribute(0, driver.SHARED_PER_BLOCK_OPTIN) == 232448
    asked = fake.calls("cuDeviceGetAttribute")
    drv.attribute(0, driver.SHARED_PER_BLOCK_OPTIN)
    assert fake.calls("cuDeviceGetAttribute") == asked  # read once
    for wrong in (-1, 3):
        with pytest.raises(CudaDriverError, match=f"asked for device {wrong}; there are 3"):
            drv.primary_context(wrong)


def test_context_is_retained_once_from_many_threads(fakecuda: FakeCuda) -> None:
    drv = driver.get()
    fakecuda.set_latency("cuDevicePrimaryCtxRetain", 2000)
    found: list[int] = []
    in_threads(*[(lambda: found.append(drv.primary_context(0)))] * 8)
    assert len(set(found)) == 1
    assert fakecuda.calls("cuDevicePrimaryCtxRetain") == 1


def test_guard_gives_the_previous_context_back(make_fakecuda: Make) -> None:
    fake = make_fakecuda(devices=2)
    drv = driver.get()
    assert drv.current_context() == 0
    with drv.on_device(0):
        zero = drv.current_context()
        assert zero == drv.primary_context(0)
        with pytest.raises(ValueError, match="inside"), drv.on_device(1):
            assert drv.current_context() == drv.primary_context(1)
            raise ValueError("inside")
        assert drv.current_context() == zero
    assert drv.current_context() == 0
    assert fake.context_depth == 0


def test_capture(make_fakecuda: Make) -> None:
    fake = make_fakecuda()
    drv = driver.get()
    handle = make_stream()
    with drv.on_device(0):
        assert not drv.is_capturing(handle)
        assert not drv.is_capturing(0)
        fake.set_capture(handle)
        assert drv.is_capturing(handle)
        assert drv.is_capturing(0)
        fake.fail("cuStreamIsCapturing", 700)
        with pytest.raises(CudaDriverError, match=f"asking about stream {handle:#x}"):
            drv.is_capturing(handle)
        fake.set_capture(handle, 0)
        assert not drv.is_capturing(0)


def test_stand_in_wants_a_context(fakecuda: FakeCuda) -> None:
    """What the runtime must cope with in a fresh thread."""
    drv = driver.get()
    status = c_int()
    assert drv.try_call("cuStreamIsCapturing", 0, byref(status)) == 201
    assert drv.try_call("cuCtxSynchronize") == 201


# ---- processes ----


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork(fakecuda: FakeCuda) -> None:
    done = child(
        "import os, sys\n"
        "from kernel_hub import driver\n"
        "drv = driver.get()\n"
        "if os.fork() == 0:\n"
        "    for use in (driver.get, lambda: drv.call('cuCtxSynchronize')):\n"
        "        try:\n"
        "            use()\n"
        "        except RuntimeError as error:\n"
        "            print(error.code, 'spawn' in str(error), 'before this process' in str(error)\n"
        "                  or 'forked from one' in str(error))\n"
        "    sys.stdout.flush()\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "assert driver.get() is drv\n",
        **{driver.LIBRARY_VARIABLE: fakecuda.path},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "3 True True\n3 True True\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork_before_the_first_use_is_fine(fakecuda: FakeCuda) -> None:
    done = child(
        "import os\n"
        "from kernel_hub import driver\n"
        "if os.fork() == 0:\n"
        "    print(driver.get().device_count, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n",
        **{driver.LIBRARY_VARIABLE: fakecuda.path},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_nothing_is_opened_at_import() -> None:
    done = child(
        "import kernel_hub, sys\n"
        "from kernel_hub import driver\n"
        "assert driver.library._driver is None\n"
        "assert not any('libcuda' in line for line in open('/proc/self/maps'))\n"
        if sys.platform == "linux"
        else "from kernel_hub import driver\nassert driver.library._driver is None\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_environment_steers_the_stand_in_of_a_child() -> None:
    done = child(
        "from kernel_hub import driver\n"
        "drv = driver.get()\n"
        "print(drv.device_count, drv.version, drv.compute_capability(1))\n",
        FAKECUDA_DEVICES="2",
        FAKECUDA_CC="8.0",
        FAKECUDA_DRIVER_VERSION="12080",
        **{driver.LIBRARY_VARIABLE: str(build())},
    )
    assert (done.stdout, done.stderr) == ("2 12080 (8, 0)\n", "")
