"""Which modules `import cpm_kernels…` gives, with and without the package, and what they run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import HOPPER, SIZES, write_package
from fakecuda import FakeCuda

from kernel_hub.errors import FunctionNotFoundError
from kernel_hub.integrations import cpm_kernels
from kernel_hub.integrations.cpm_kernels import device

Names = Callable[[], set[str]]


def loaded() -> set[str]:
    return {name for name in sys.modules if name.partition(".")[0] == "cpm_kernels"}


@pytest.fixture
def alone() -> Iterator[None]:
    """No cpm_kernels is installed, wherever this machine may have one."""
    before = sys.path[:]
    sys.path[:] = [path for path in before if not (Path(path or ".") / "cpm_kernels").is_dir()]
    yield
    sys.path[:] = before


@pytest.fixture
def package(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package, and the alias in front of it; gives the package data's path."""
    data = write_package(tmp_path, HOPPER.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    cpm_kernels.install()
    yield data
    cpm_kernels.uninstall()


def test_the_base_without_the_package(alone: None, alias: None) -> None:
    base = importlib.import_module("cpm_kernels.kernels.base")
    assert base.Kernel.__module__ == "kernel_hub.integrations.cpm_kernels.base"
    with pytest.raises(RuntimeError, match=r"no cpm_kernels is installed.*pip install"):
        base.Kernel("arith", ["cu_arith_global_scale"])
    with pytest.raises(AttributeError, match=r"'cpm_kernels.kernels' has no attribute 'gelu'"):
        importlib.import_module("cpm_kernels.kernels").gelu  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("cpm_kernels.torch")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("cpm_kernels.library.nvrtc")


def test_the_base_runs_nothing_of_the_package(package: Path) -> None:
    package.unlink()  # what a client does not use may be missing
    importlib.import_module("cpm_kernels.kernels.base")
    assert loaded() == {"cpm_kernels", "cpm_kernels.kernels", "cpm_kernels.kernels.base"}
    with pytest.raises(RuntimeError, match=r"client.fatbin.*not in .*kernels.cuda"):
        importlib.import_module("cpm_kernels.kernels").write_pair  # noqa: B018


def test_the_package_on_top(package: Path, fakecuda: FakeCuda) -> None:
    whole = importlib.import_module("cpm_kernels")
    kernels = importlib.import_module("cpm_kernels.kernels")
    from cpm_kernels.torch import pair

    assert whole.write_pair is kernels.write_pair is pair
    opened = importlib.import_module("cpm_kernels.library.base").opened
    assert opened == [] and fakecuda.all_calls == 0
    fakecuda.set_params("writePair", SIZES["writePair"])
    fakecuda.record(True)
    pair(0x40, 5, 6, None)
    assert fakecuda.launch().params == (
        (0x40).to_bytes(8, "little"),
        bytes([5, 0, 0, 0, 6, 0, 0, 0]),
        bytes(8),
    )
    assert opened == []
    assert kernels.pairs.kind() == 7
    assert opened == ["blas"]
    assert kernels.pairs.handle() == "handle"
    assert opened == ["blas", "cublaslt"]


def test_the_kernels_of_a_file(package: Path, fakecuda: FakeCuda) -> None:
    from cpm_kernels.kernels.base import Kernel

    kernel = Kernel("client", ["writePair", "noSuchFunction"])
    assert kernel.filename == "cuda/client.fatbin"
    assert kernel.code == HOPPER.read_bytes()
    assert getattr(kernel, "int4WeightCompression", None) is None  # it was not asked for
    with pytest.raises(FunctionNotFoundError, match="it has: writePair"):
        kernel.writePear  # noqa: B018
    with pytest.raises(RuntimeError, match=r"(?s)named symbol not found.*client.fatbin"):
        kernel.noSuchFunction(1, 1, 0, 0, [])


def test_import_star(package: Path) -> None:
    names: dict[str, Any] = {}
    exec("from cpm_kernels.kernels import *", names)
    assert "write_pair" in names


def test_a_failure_of_the_packages_code_is_said_each_time(package: Path) -> None:
    source = package.parent.parent / "pairs.py"
    text = source.read_text()
    source.write_text("raise OSError('half installed')\n")
    kernels = importlib.import_module("cpm_kernels.kernels")
    for _ in range(2):
        with pytest.raises(OSError, match="half installed"):
            kernels.write_pair  # noqa: B018
    source.write_text(text + "# mended\n")
    assert callable(kernels.write_pair)


def test_install_and_uninstall(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "cpm_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("version = 'theirs'\n")
    monkeypatch.syspath_prepend(tmp_path)
    theirs = importlib.import_module("cpm_kernels")
    before = list(sys.meta_path)
    cpm_kernels.install()
    cpm_kernels.install(substitute=True)
    assert len(sys.meta_path) == len(before) + 1
    ours = importlib.import_module("cpm_kernels")
    assert ours is not theirs and ours.version == "theirs"
    importlib.import_module("cpm_kernels.kernels.base")
    cpm_kernels.uninstall()
    cpm_kernels.uninstall()
    assert sys.meta_path == before
    assert loaded() == {"cpm_kernels"} and sys.modules["cpm_kernels"] is theirs
    del sys.modules["cpm_kernels"]


def test_the_device(make_fakecuda: Callable[..., FakeCuda]) -> None:
    make_fakecuda(devices=2, capability=(8, 9))
    assert device.num_devices() == 2
    assert device.current_device().architecture == 89
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match="there are 2 devices"):
            device.Device(wrong)
