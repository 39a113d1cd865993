"""Fixtures: a fresh stand-in driver for CPU tests, and the rules of GPU tests.

GPU tests live in tests/gpu or carry `@pytest.mark.gpu`. Without a GPU they skip with the reason;
`--require-gpu` turns that into a failure.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

with contextlib.suppress(ImportError):
    # First: once something has imported the standard distutils, setuptools refuses to load, and
    # torch.compile needs it.
    import setuptools  # noqa: F401

import pytest
import skips
from fakecuda import CompilerMissingError, FakeCuda
from gpu_memory import give_back

from kernel_hub import Kernel, KernelFunction, driver
from kernel_hub.arrays import interop

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip = skips.importorskip
# Where it cannot be had (no network), the rest of the tests runs all the same.
if not skips.is_there("hypothesis"):
    sys.modules["hypothesis"] = skips.Missing("hypothesis")
# What `kernel-hub tune` left on this machine is no part of what is tested.
os.environ["KERNEL_HUB_TUNED"] = "0"
# Nor what it compiled before; and nothing that is compiled here stays.
_cache_home = tempfile.TemporaryDirectory(prefix="kernel_hub_cache_")
os.environ["XDG_CACHE_HOME"] = _cache_home.name
os.environ.pop("KERNEL_HUB_CACHE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="GPU tests fail, not skip, without a GPU"
    )
    parser.addoption(
        "--every-case", action="store_true", help="all cases of every test, not some drawn by lot"
    )
    parser.addoption(
        "--draw",
        action="store_true",
        help="cases drawn by lot of some files too, not of a whole run",
    )
    parser.addoption(
        "--record-costs",
        action="store_true",
        help="write tests/costs.json, which cases are drawn by",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU and its driver")
    from drawn import DrawnCases
    from launch_coverage import EmulatorCoverage, LaunchCoverage, is_full_run

    is_drawn = is_full_run(config, mark="not gpu and not slow") and not (
        config.getoption("--require-gpu") or config.getoption("--every-case")
    )
    if config.getoption("--record-costs"):
        from costs import RecordedCosts

        config.pluginmanager.register(RecordedCosts())
    if is_drawn or config.getoption("--draw"):
        config.pluginmanager.register(DrawnCases())
    config.pluginmanager.register(EmulatorCoverage(config, is_drawn))
    config.pluginmanager.register(skips.SkipSummary(_no_gpu_reason if is_drawn else None))
    if config.getoption("--require-gpu"):
        coverage = LaunchCoverage(config)
        coverage.install()
        config.pluginmanager.register(coverage)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For -n auto: a worker a core, each with one thread; on a GPU all tests in one process."""
    if config.getoption("--require-gpu") or not _no_gpu_reason():
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return min(8, os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.relative_to(ROOT / "tests").parts[:-1]:
            item.add_marker(pytest.mark.gpu)
    items[:] = (item for item in items if not _is_no_way(item))


def _is_no_way(item: pytest.Item) -> bool:
    """The emulated way of a test that is marked gpu as a whole: hours of larger cases."""
    given = getattr(item, "callspec", None)
    ways = (given.params.get(name) for name in ("way", "hopper_way")) if given else ()
    return item.get_closest_marker("gpu") is not None and "emulated" in ways


def _collect_garbage() -> None:
    """Makes dead arrays give their memory back, in 1 ms.

    What is there after a collection that took long (torch alone: half a million objects; a compiler
    of torch's that a test has loaded since: as many again) need not be looked through by the next.
    """
    started = time.perf_counter()
    gc.collect()
    if time.perf_counter() - started > 0.02:
        gc.freeze()


def pytest_collection_finish() -> None:
    _collect_garbage()


@functools.cache
def _no_gpu_reason() -> str:
    """Why GPU tests cannot run here, or ''. Asked of a child: this process stays free to fork."""
    code = (
        "from kernel_hub import driver\n"
        "try: driver.get().primary_context(0)\n"
        "except Exception as error: print(str(error).splitlines()[0].removesuffix('. Tried:'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    said = (done.stdout or done.stderr).strip()
    if done.returncode == 0 and not said:
        return ""
    return f"no usable GPU: {said or f'the driver ended a process with {done.returncode}'}"


def _no_cuda_reason(item: pytest.Item) -> str:
    """Why a test of tensors on the GPU cannot run with the torch that is installed, or ''."""
    torch = sys.modules.get("torch")
    uses_it = (
        item.path.is_relative_to(ROOT / "tests/ops")
        or "torch" in getattr(item, "fixturenames", ())
        or getattr(getattr(item, "module", None), "torch", None) is torch
    )
    if torch is None or not uses_it or torch.version.cuda:
        return ""
    return "this torch is a build for the CPU: make test TORCH=cuda"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if reason := _no_gpu_reason() or _no_cuda_reason(item):
        if item.config.getoption("--require-gpu"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """What a kernel broke is the fault of the test that launched it, not of one after it."""
    torch = sys.modules.get("torch")
    if item.get_closest_marker("gpu") and torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        give_back(torch.cuda)


def _forget_runtime() -> None:
    """Drop the runtime's driver and caches; arrays that died give their memory back first."""
    _collect_garbage()
    for name in ("kernel_hub.kernel", "kernel_hub.arrays.device_array"):
        if name in sys.modules:
            getattr(sys.modules[name], "_reset_for_tests", lambda: None)()
    driver.library._driver = None


@pytest.fixture
def make_fakecuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeCuda]]:
    """`make_fakecuda(devices=2, …)`: kernel_hub runs on this stand-in until the test ends."""
    monkeypatch.delenv("KERNEL_HUB_LAUNCH_BLOCKING", raising=False)

    def make(**options: object) -> FakeCuda:
        try:
            fake = FakeCuda(**options)  # type: ignore[arg-type]
        except CompilerMissingError as missing:
            pytest.skip(str(missing))
        _forget_runtime()
        monkeypatch.setenv(driver.LIBRARY_VARIABLE, fake.path)
        # A torch that drives a real GPU knows nothing of the stand-in's devices and streams.
        monkeypatch.setattr(interop, "raw_stream_getter", lambda: None)
        monkeypatch.setattr(interop, "current_device", lambda: 0)
        return fake

    yield make
    _forget_runtime()


@pytest.fixture
def fakecuda(make_fakecuda: Callable[..., FakeCuda]) -> FakeCuda:
    """One fake H200 under driver 13.0."""
    return make_fakecuda()


@pytest.fixture
def context(fakecuda: FakeCuda) -> Iterator[FakeCuda]:
    """A stand-in whose first device is current in this thread."""
    with driver.get().on_device(0):
        yield fakecuda


@pytest.fixture
def probe(fakecuda: FakeCuda) -> KernelFunction:
    """launch_probe_5 of the shipped cubin on the stand-in driver: (out, x, y, n, scale)."""
    return Kernel("launch_probe").launch_probe_5
