"""What the probe's child runs: this package and the standard library, whatever lies around it.

Each case is a process that has imported kernel_hub in one of the ways people do, plants modules of
every name where an import might look, and then has an image probed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy
import pytest
from fakecuda import FakeCuda
from lots import Lots

from kernel_hub import Kernel, cache_folder, driver
from kernel_hub.errors import ProbeError
from kernel_hub.launch import probing

ROOT = Path(__file__).resolve().parents[2]
CUBIN = ROOT / "tests/cubin/data/tiny_sm90.cubin"

# argv: how sys.path is made, the package's folder, where to plant, the file that planted code
# writes, the cubin.
PARENT = """
import os, pathlib, site, sys, zipfile
way, package, marker, cubin, *places = sys.argv[1:]
if way == "editable":
    site.addsitedir(package)
else:
    sys.path.append(package)
from kernel_hub import Kernel, cache_folder, driver
from kernel_hub.compilers import nvrtc
from kernel_hub.launch import probing
import ctypes, json, numpy, secrets, signal, subprocess, tempfile, kernel_hub.cubin
driver.get()
code = (  # as early as it may be run
    f"import posix as p; p.write(p.open({marker!r}, p.O_WRONLY | p.O_CREAT), __name__.encode()); "
    "p._exit(0)"
)
for place in places:
    for name in {*sys.stdlib_module_names, "numpy", "sitecustomize", "usercustomize"}:
        pathlib.Path(place, name + ".py").write_text(code)
kernel = Kernel(pathlib.Path(cubin), probe=True)
kernel.load()
print("loaded by", probing.__file__)
"""


def run(way: str, package: Path, places: list[Path], fake: FakeCuda, python: str) -> str:
    """What planted code wrote; asserts that the image was probed and loaded."""
    folder = places[0]
    marker = folder / "it ran"
    numpys = str(Path(numpy.__file__).parents[1])
    environment = {
        **os.environ, driver.LIBRARY_VARIABLE: fake.path, cache_folder.VARIABLE: "0",
        "PYTHONPATH": numpys, "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    script = folder.parent / "parent.py"
    script.write_text(PARENT)
    arguments = [way, package, marker, CUBIN, *places]
    done = subprocess.run(
        [python, "-S", script, *map(str, arguments)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    ran = marker.read_text() if marker.exists() else ""
    assert (done.returncode, ran) == (0, ""), done.stderr
    assert done.stdout.startswith("loaded by")
    return done.stdout.removeprefix("loaded by ").strip()


def copied(folder: Path) -> Path:
    """The package in a folder of its own, with the cubins beside it."""
    ignored = shutil.ignore_patterns("__pycache__", "ops", "formats", "*.cubin")
    shutil.copytree(ROOT / "kernel_hub", folder / "kernel_hub", ignore=ignored)
    return folder


@pytest.mark.parametrize("way", ["PYTHONPATH", "editable", "zip", "venv"])
def test_nothing_else_is_run(fakecuda: FakeCuda, tmp_path: Path, way: str) -> None:
    """Neither from the working folder, nor from the one that the package lies in."""
    here = tmp_path / "here"
    here.mkdir()
    package, places, python = copied(tmp_path / "site"), [here], sys.executable
    places.append(package)
    if way == "zip":
        package = Path(shutil.make_archive(str(tmp_path / "wheel"), "zip", package))
    elif way == "editable":
        (tmp_path / "more").mkdir()
        (tmp_path / "more/kernel_hub.pth").write_text(str(package))
        package = tmp_path / "more"
    elif way == "venv":
        venv.create(tmp_path / "venv", symlinks=True)
        python = str(tmp_path / "venv/bin/python")
    found = run(way, package, places, fakecuda, python)
    assert Path(found).is_relative_to(package if way != "editable" else tmp_path / "site")


def test_a_package_among_others_runs_none_of_them(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """In site-packages, with .pth files and a sitecustomize that would run at each start."""
    folder = copied(tmp_path / "lib" / "site-packages")
    here = tmp_path / "here"
    here.mkdir()
    (folder / "evil.pth").write_text("import os; os._exit(0)")
    run("PYTHONPATH", folder, [here, folder], fakecuda, sys.executable)


@pytest.fixture
def plain(fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    driver.get()
    return tmp_path / "probed"


READS = "import json, sys; head = json.loads(sys.stdin.buffer.readline()); "
EARLY = [
    "",
    "import os; os._exit(0)",
    "print('ready'); print('survived')",
    READS + "print('ready', 'survived')",
    READS + "print(head['ready'])",
    READS + "print(head['ready'] + head['survived'])",
    READS + "print(head['ready']); print('survived ' + '0' * 32)",
]


@pytest.mark.parametrize("program", EARLY)
def test_an_early_end_is_no_answer(
    plain: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """Exit code 0, and even words like the right ones: what they end with is new each time."""
    monkeypatch.setattr(probing, "_PROGRAM", program)
    with pytest.raises(ProbeError, match=r"could not be probed.*(no context|without an answer)"):
        Kernel(CUBIN, probe=True).load()
    assert not plain.exists()


def test_the_words_are_new_each_time(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_PROGRAM", READS + "print(head['ready'], file=sys.stderr)")
    said = set()
    for _ in range(3):
        with pytest.raises(ProbeError, match=r"ready \w{32}") as caught:
            Kernel(CUBIN, probe=True).load()
        said.add(str(caught.value))
    assert len(said) == 3


def test_a_chatty_driver_does_not_hide_the_answer(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os; os.write(1, b'libcuda: hello\\n\\xff\\n')" + probing._PROGRAM
    monkeypatch.setattr(probing, "_PROGRAM", program)
    Kernel(CUBIN, probe=True).load()
    assert len(list(plain.iterdir())) == 1


def test_an_interrupted_child_says_nothing_of_the_image(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a terminal reaches the child too; the image was remembered as deadly."""
    monkeypatch.setenv("FAKECUDA_AT", "cuLibraryLoadData=int")
    # A job in the background ignores the signal, and its children would too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(ProbeError, match=r"ended from outside \(signal 2\)"):
            Kernel(CUBIN, probe=True).load()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not plain.exists()


def test_any_number_of_functions(plain: Path) -> None:
    """Their names do not fit on a command line."""
    names = ["add"] * 100_000
    assert probing._ask(CUBIN.read_bytes(), "x", names, 0) == ""


def test_names_of_any_kind(plain: Path) -> None:
    lots = Lots("names")
    for _ in range(10):
        name = "".join(chr(lots.randrange(1, 0x3000)) for _ in range(lots.randint(1, 40)))
        answer = probing._ask(CUBIN.read_bytes(), "x", ["add", name], 0)
        assert "cuLibraryGetKernel failed" in answer, f"{lots}: {name!r}: {answer}"


def test_no_frozen_program_is_started(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There sys.executable is the program itself."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ProbeError, match="no interpreter"):
        Kernel(CUBIN, probe=True).load()


def test_the_standard_library_alone_is_on_the_path(plain: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import sys; print('\\n'.join(sys.path))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = sysconfig.get_paths()
    library = [Path(paths["stdlib"]).resolve(), Path(paths["platstdlib"]).resolve()]
    for line in done.stdout.split():
        if os.path.exists(line):
            assert any(Path(line).resolve().is_relative_to(path) for path in library), line
