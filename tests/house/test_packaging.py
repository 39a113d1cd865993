"""What is shipped: wheel, sdist, and finding the cubins however the package is installed."""

from __future__ import annotations

import calendar
import hashlib
import importlib.util
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import shipped_tree

ROOT = Path(__file__).resolve().parents[2]
needs_setuptools = pytest.mark.skipif(
    not importlib.util.find_spec("setuptools")
    # By its number: looking inside it imports it, which fails once distutils is imported.
    or [int(n) for n in metadata.version("setuptools").split(".")[:2]] < [70, 1],
    reason="setuptools >= 70.1, which builds wheels by itself, is not installed",
)

# Run in a process of its own, far from the checkout: where are the cubins, do their digests hold?
PROBE = """
import json, pkgutil, sys
from kernel_hub.collection.manifest import open_collection
collection = open_collection()
cubins = [entry for archs in collection.manifest.cubins.values() for entry in archs.values()]
for entry in cubins:
    collection.read(entry)
import kernel_hub
assert pkgutil.get_data("kernel_hub", "tuning/shipped/linear.json")
found = [str(collection.root), kernel_hub.__version__, len(cubins), "torch" in sys.modules]
print(json.dumps(found))
"""


def run_backend(folder: Path, code: str, umask: int = -1, **environment: str) -> str:
    """Runs setuptools' build backend in `folder` with nothing on PATH: no nvcc, no shell."""
    code = f"import setuptools.build_meta as backend; result = {code}; print(result)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PATH": "/nonexistent", "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
        umask=umask,
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
    return shipped_tree.copy_to(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with a few cubins, for what is built time and again."""
    return shipped_tree.copy_to(tmp_path_factory.mktemp("few"), shipped_tree.FEW)


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    return out / run_backend(checkout, f"backend.build_wheel({str(out)!r})")


@pytest.fixture(scope="module")
def few_wheel(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("few_wheel")
    return out / run_backend(few, f"backend.build_wheel({str(out)!r})")


@pytest.fixture(scope="module")
def sdist(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    return out / run_backend(few, f"backend.build_sdist({str(out)!r})")


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
    sdist: Path, few_wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    (top,) = tmp_path.iterdir()
    for name in ("build_cubins.sh", "Makefile", "LICENSE", "tests/house/test_packaging.py"):
        assert (top / name).is_file(), name
    assert os.access(top / "build_cubins.sh", os.X_OK)
    here, there = (
        {str(path.relative_to(root)) for path in (root / "csrc").rglob("*.cu*")}
        for root in (ROOT, top)
    )
    assert here == there
    again = top / run_backend(top, "backend.build_wheel('.')")
    with zipfile.ZipFile(few_wheel) as first, zipfile.ZipFile(again) as second:
        contents = [{i.filename: i.CRC for i in z.infolist()} for z in (first, second)]
    assert contents[0] == contents[1]
    assert again.read_bytes() == few_wheel.read_bytes()


COMMITTED = 1_700_000_000


def copy_by_lot(source: Path, target: Path, seed: int) -> None:
    """A copy whose files were made in another order, at other times and with another umask."""
    lot = random.Random(seed)
    files = [path for path in source.rglob("*") if path.is_file()]
    for path in lot.sample(files, len(files)):
        copied = target / path.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied)
        copied.chmod((path.stat().st_mode | 0o222) & ~lot.choice([0o077, 0o022, 0o002, 0]))
        date = lot.randrange(10**9, 2 * 10**9)
        os.utime(copied, (date, date))


def digests(path: Path) -> dict[str, str]:
    """The digest of everything in a wheel or sdist: when two differ, this says where."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {i.filename: f"{i!r} {i.date_time} {i.CRC}" for i in archive.infolist()}
    with tarfile.open(path) as archive:
        return {
            member.name: f"{member.get_info()} {hashlib.sha256(read.read()).hexdigest()}"
            for member in archive
            if (read := archive.extractfile(member))
        }


@pytest.mark.slow
@needs_setuptools
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_two_copies_build_the_same_bytes(
    kind: str, few_wheel: Path, sdist: Path, few: Path, tmp_path: Path
) -> None:
    """At another path, in other files' order, times, umask, home, zone and language."""
    folder = tmp_path / "a place of another name" / "kernel-hub.copy"
    copy_by_lot(few, folder, seed=20261122)
    shutil.rmtree(folder / "build", ignore_errors=True)  # of the first build
    out = tmp_path / "out"
    out.mkdir()
    other = {"TZ": "Pacific/Kiritimati", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "77"}
    name = run_backend(folder, f"backend.build_{kind}({str(out)!r})", umask=0o077, **other)
    first, second = {"wheel": few_wheel, "sdist": sdist}[kind], out / name
    assert first.name == second.name
    assert digests(first) == digests(second)
    assert first.read_bytes() == second.read_bytes()


@needs_setuptools
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_what_is_built_is_dated_with_the_commit(tmp_path: Path) -> None:
    """And with SOURCE_DATE_EPOCH where that is given; an sdist hands the date on."""
    folder = tmp_path / "checkout"
    (folder / "kernel_hub").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "kernel_hub/__init__.py"):
        shutil.copy(ROOT / name, folder / name)
    path = {"PATH": os.environ["PATH"]}
    commit = {"GIT_COMMITTER_DATE": f"{COMMITTED} +1400", "GIT_AUTHOR_DATE": "1234567890 +0000"}
    person = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    for command in (("init", "-q"), ("add", "."), (*person, "commit", "-q", "-m", "One")):
        environment = {**path, **commit, "HOME": str(tmp_path)}
        subprocess.run(["git", *command], cwd=folder, env=environment, check=True)
    out = str(tmp_path)

    def dates_of(name: str) -> set[int]:
        if name.endswith(".whl"):
            with zipfile.ZipFile(tmp_path / name) as archive:
                times = [(*info.date_time, 0, 0, 0) for info in archive.infolist()]
            return {calendar.timegm(one) for one in times}
        with tarfile.open(tmp_path / name) as archive:
            return {int(member.mtime) for member in archive}

    for given, date in ((path, COMMITTED), ({"SOURCE_DATE_EPOCH": "1650000000"}, 1650000000)):
        wheel = run_backend(folder, f"backend.build_wheel({out!r})", **given)
        sdist = run_backend(folder, f"backend.build_sdist({out!r})", **given)
        assert dates_of(wheel) == dates_of(sdist) == {date}
        assert (tmp_path / sdist).read_bytes()[4:8] == struct.pack("<I", date)  # gzip's own
        with tarfile.open(tmp_path / sdist) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(tmp_path / str(date))
            assert {(one.uid, one.gid, one.uname, one.gname) for one in archive} == {(0, 0, "", "")}
        (top,) = (tmp_path / str(date)).iterdir()
        content = (tmp_path / wheel).read_bytes()
        again = run_backend(top, f"backend.build_wheel({out!r})")  # neither git nor a variable
        assert (tmp_path / again).read_bytes() == content


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
