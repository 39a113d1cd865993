"""What is shipped: wheel, sdist, and finding the cubins however the package is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = (
    *("kernel_hub", "csrc", "cubins", "tests", "examples", "benchmarks", "docs", "native"),
    *("setup.py", "pyproject.toml", "MANIFEST.in", "Makefile", "build_cubins.sh", "LICENSE"),
    *("README.md", ".clang-format"),
)
needs_setuptools = pytest.mark.skipif(
    not importlib.util.find_spec("setuptools")
    # By its number: looking inside it imports it, which fails once distutils is imported.
    or [int(n) for n in metadata.version("setuptools").split(".")[:2]] < [70, 1],
    reason="setuptools >= 70.1, which builds wheels by itself, is not installed",
)

# Run in a process of its own, far from the checkout: where are the cubins, do their digests hold?
PROBE = """
import json, pkgutil, sys
from kernel_hub.manifest import open_collection
collection = open_collection()
cubins = [entry for archs in collection.manifest.cubins.values() for entry in archs.values()]
for entry in cubins:
    collection.read(entry)
import kernel_hub
assert pkgutil.get_data("kernel_hub", "tables/linear.json")
found = [str(collection.root), kernel_hub.__version__, len(cubins), "torch" in sys.modules]
print(json.dumps(found))
"""


def run_backend(folder: Path, code: str) -> str:
    """Runs setuptools' build backend in `folder` with nothing on PATH: no nvcc, no shell."""
    code = f"import setuptools.build_meta as backend; result = {code}; print(result)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PATH": "/nonexistent", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def probe(path: str, cwd: Path, prepare: str = "") -> tuple[str, int]:
    """Root of the collection and number of cubins, with `path` as PYTHONPATH.

    Without site-packages (-S): the environment that runs the tests has kernel_hub too.
    """
    done = subprocess.run(
        [sys.executable, "-S", "-c", prepare + PROBE],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    root, version, num_cubins, torch_loaded = json.loads(done.stdout)
    assert version == "0.1.0"
    assert not torch_loaded
    return root, num_cubins


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would hold, so that building leaves nothing in the real tree."""
    folder = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", ".*cache", "*.egg-info")
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    return out / run_backend(checkout, f"backend.build_wheel({str(out)!r})")


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    return out / run_backend(checkout, f"backend.build_sdist({str(out)!r})")


def shipped_cubins() -> set[str]:
    manifest = json.loads((ROOT / "cubins/manifest.json").read_text())
    return {entry["file"] for archs in manifest["cubins"].values() for entry in archs.values()}


@needs_setuptools
def test_wheel_is_for_any_python_and_holds_the_cubins(wheel: Path) -> None:
    assert wheel.name == "kernel_hub-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = "kernel_hub-0.1.0.dist-info/"
        metadata = archive.read(info + "METADATA").decode()
        scripts = archive.read(info + "entry_points.txt").decode()
    assert {f"kernel_hub/cubins/{file}" for file in shipped_cubins()} <= names
    assert {"kernel_hub/cubins/manifest.json", "kernel_hub/py.typed"} <= names
    sources = (p for p in (ROOT / "kernel_hub").rglob("*.*") if p.suffix != ".pyc")
    assert {p.relative_to(ROOT).as_posix() for p in sources if p.is_file()} <= names
    assert any(name.startswith(info) and name.endswith("LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"kernel_hub", info[:-1]}
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert [line for line in required if "extra ==" not in line] == ["Requires-Dist: numpy>=1.23"]
    assert "Requires-Python: >=3.10" in metadata
    assert "kernel-hub = kernel_hub.cli:main" in scripts


@needs_setuptools
def test_sdist_holds_the_sources_and_gives_the_same_wheel(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (top,) = tmp_path.iterdir()
    for name in ("build_cubins.sh", "Makefile", "LICENSE", "tests/test_packaging.py"):
        assert (top / name).is_file(), name
    assert os.access(top / "build_cubins.sh", os.X_OK)
    sources = {path.name for path in (ROOT / "csrc").rglob("*.cu*")}
    assert sources == {path.name for path in (top / "csrc").rglob("*.cu*")}
    again = top / run_backend(top, "backend.build_wheel('.')")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        contents = [{i.filename: i.CRC for i in z.infolist()} for z in (first, second)]
    record = "kernel_hub-0.1.0.dist-info/"
    same = [{n: crc for n, crc in c.items() if not n.startswith(record)} for c in contents]
    assert same[0] == same[1]


@needs_setuptools
def test_unpacked_wheel_finds_its_cubins(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    root, num_cubins = probe(str(tmp_path / "site"), tmp_path)
    assert root == str(tmp_path / "site/kernel_hub/cubins")
    assert num_cubins == len(shipped_cubins())


@needs_setuptools
def test_zip_import_finds_its_cubins(wheel: Path, tmp_path: Path) -> None:
    root, num_cubins = probe(str(wheel), tmp_path)
    assert wheel.name in root
    assert num_cubins == len(shipped_cubins())


def test_plain_checkout_finds_its_cubins(checkout: Path, tmp_path: Path) -> None:
    root, num_cubins = probe(str(checkout), tmp_path)
    assert root == str(checkout / "cubins")
    assert num_cubins == len(shipped_cubins())


@needs_setuptools
def test_editable_install_finds_its_cubins(checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "wheel"
    out.mkdir()
    built = out / run_backend(checkout, f"backend.build_editable({str(out)!r})")
    site = tmp_path / "site"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(site)
    root, num_cubins = probe("", tmp_path, prepare=f"import site; site.addsitedir({str(site)!r})\n")
    assert root == str(checkout / "cubins")
    assert num_cubins == len(shipped_cubins())
