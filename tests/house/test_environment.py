"""tools/environment.py: which Python `make demo` and `make test` run on, and what it fetches."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_hub.measure import torch_builds

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
import environment  # noqa: E402
import pythons  # noqa: E402
from pythons import Environment, InstallError, Python, look  # noqa: E402

ALL = frozenset({name for needs in environment.NEEDS.values() for name in needs})
BARE = Python("/hand/bin/python", (3, 12, 1), None, (24, 0), frozenset(), True, ("/hand/site",))
CPU = replace(BARE, torch="cpu", modules=ALL)
CUDA = replace(BARE, torch="cuda", modules=ALL)
WITHOUT_PYTEST = replace(CPU, modules=frozenset({"numpy"}))


class Bench:
    """A machine of which nothing is real: the driver, the interpreters, pip and the free disk.

    `pip` holds the commands in order; `refuse` says which of them fail.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pip: list[tuple[str, ...]] = []
        self.refuse: Callable[[tuple[str, ...]], bool] = lambda command: False
        self.driver: int | None = None
        self.works = True
        self.free = 500.0
        self.own, self.over = folder / ".venv", folder / ".venv-over"
        self.brings: dict[Path, str] = {}  # torch that an environment has got
        self.wheel = "cpu"  # what a folder of wheels would bring
        self.has_cuda = True  # what PyTorch's CUDA index has can be installed
        monkeypatch.delenv("PIP_NO_INDEX", raising=False)
        monkeypatch.setattr(environment, "OWN", self.own)
        monkeypatch.setattr(environment, "OVER", self.over)
        monkeypatch.setattr(environment, "cuda_version", lambda: self.driver)
        monkeypatch.setattr(environment, "drives_the_gpu", lambda python: self.works)
        monkeypatch.setattr(torch_builds, "free_gigabytes", lambda folder: self.free)
        monkeypatch.setattr(environment, "look", self.look)
        monkeypatch.setattr(pythons, "look", self.look)
        bench = self

        def ensure(one: Environment, *, anew: bool = False) -> None:
            one.path.parent.mkdir(parents=True, exist_ok=True)
            one.path.touch()

        def pip(one: Environment, *command: str, quiet: bool = True) -> None:
            bench.pip.append(command)
            if bench.refuse(command):
                raise InstallError(f"   no {command[-1]}")
            if "torch" in command and command[0] == "install":
                is_cuda = not {"--no-index", "--no-deps"} & set(command)  # from an index, whole
                bench.brings[one.path] = "cuda" if is_cuda and bench.has_cuda else bench.wheel
            if command[0] == "uninstall":
                del bench.brings[one.path]

        monkeypatch.setattr(Environment, "ensure", ensure)
        monkeypatch.setattr(Environment, "pip", pip)

    def look(self, path: Path | str, names: object = ()) -> Python | None:
        path = Path(path)
        torch = self.brings.get(path)
        return replace(CPU, path=str(path), torch=torch) if path.exists() else None

    @property
    def of_torch(self) -> list[tuple[str, ...]]:
        return [command for command in self.pip if "torch" in command]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.mark.parametrize("driver", [None, 13000])
@pytest.mark.parametrize("purpose", ["demo", "test", "bench"])
@pytest.mark.parametrize("hand", [CPU, CUDA])
def test_a_python_that_has_all_is_used_as_it_is(
    hand: Python, purpose: str, driver: int | None, bench: Bench
) -> None:
    bench.driver = driver
    assert environment.choose(purpose, None, hand) == Path(hand.path)
    assert not bench.pip and not bench.own.exists() and not bench.over.exists()


def test_what_a_torch_environment_lacks_comes_beside_it(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert environment.choose("demo", None, WITHOUT_PYTEST) == Path(BARE.path)
    assert environment.choose("test", None, WITHOUT_PYTEST) == bench.over / "bin/python"
    assert bench.pip == [("install", "-e", ".[test]")]
    assert "has torch, but not hypothesis, pytest" in capsys.readouterr().err
    environment.choose("test", None, WITHOUT_PYTEST)
    assert len(bench.pip) == 1  # once
    changed = replace(WITHOUT_PYTEST, sites=("/other/site",))  # another one is active now
    environment.choose("test", None, changed)
    assert len(bench.pip) == 2


def test_torch_for_the_cpu_never_comes_from_where_cuda_is(bench: Bench) -> None:
    bench.refuse = lambda command: "--no-index" in command
    assert environment.choose("demo", None, BARE) == bench.own / "bin/python"
    first, second, *_ = bench.of_torch
    assert first == ("install", "--no-index", "--no-deps", "torch")
    assert {"--index-url", torch_builds.CPU_INDEX, "--no-deps"} <= set(second)
    num_commands = len(bench.pip)
    assert environment.choose("demo", None, BARE) == bench.own / "bin/python"
    assert len(bench.pip) == num_commands  # nothing again


def test_a_wheel_of_cuda_in_the_folder_is_not_kept_unasked(bench: Bench) -> None:
    bench.wheel = "cuda"
    environment.choose("demo", None, BARE)
    assert bench.of_torch[-1][0] == "uninstall"
    assert not bench.brings


def test_without_any_torch_to_be_had_the_rest_goes_on(bench: Bench) -> None:
    bench.refuse = lambda command: "torch" in command
    assert environment.choose("demo", None, BARE) == bench.own / "bin/python"
    tried = len(bench.of_torch)
    environment.choose("demo", None, BARE)
    assert len(bench.of_torch) == tried  # looked for once
    with pytest.raises(SystemExit):
        environment.choose("demo", "cpu", BARE)  # unless it is asked for
    assert len(bench.of_torch) > tried


def test_beside_a_gpu_nobody_fetches_torch_unasked(bench: Bench) -> None:
    bench.driver = 13000
    with_numpy = replace(BARE, modules=frozenset({"numpy"}))
    assert environment.choose("demo", None, with_numpy) == Path(BARE.path)
    assert not bench.pip
    for purpose in ("demo", "test"):
        assert environment.choose(purpose, None, BARE) == bench.own / "bin/python"
    assert bench.pip and not bench.of_torch


@pytest.mark.parametrize("seed", range(20))
def test_the_index_is_the_drivers_and_the_cost_is_said_first(
    seed: int, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drivers, free disk and what is refused by lot."""
    lot = random.Random(seed)
    bench.driver = lot.choice([13000, 13010, 13020, 14000])
    bench.free = round(lot.uniform(0, 30), 1)
    hand = lot.choice([BARE, CPU, CUDA])
    bench.works = False  # a build for another driver
    said: list[str] = []

    def refuse(command: tuple[str, ...]) -> bool:
        if command[0] == "install" and "torch" in command:
            said.append(capsys.readouterr().err)
        return False

    bench.refuse = refuse
    build = torch_builds.build_for(bench.driver)
    assert build and build.cuda == "13.0"
    if bench.free < build.download_gigabytes + build.disk_gigabytes:
        with pytest.raises(SystemExit):
            environment.choose("demo", "cuda", hand)
        assert f"{bench.free:.1f} GB are free" in capsys.readouterr().err
        assert not bench.of_torch
        return
    assert environment.choose("demo", "cuda", hand) == bench.own / "bin/python"
    (install,) = (command for command in bench.of_torch if command[0] == "install")
    assert build.index in install
    (before,) = said
    assert torch_builds.cost(build, bench.own) in before and str(bench.own) in before


def test_pypi_is_asked_where_the_index_has_none_for_this_python(bench: Bench) -> None:
    bench.driver = 13000
    bench.refuse = lambda command: any("whl/cu130" in word for word in command)
    environment.choose("demo", "cuda", BARE)
    assert bench.of_torch[-1][0] == "install"
    assert not any("index-url" in word for word in bench.of_torch[-1])


def test_a_torch_without_cuda_is_no_answer_to_the_question_for_one(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip fell back on a folder's wheel for the CPU where it could not reach the index."""
    bench.driver = 13000
    bench.has_cuda = False
    with pytest.raises(SystemExit) as ended:
        environment.choose("demo", "cuda", BARE)
    assert ended.value.code == 1
    assert "chose a torch without CUDA" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("driver", "said"),
    [(None, "found no NVIDIA driver"), (12080, "need 13.0 or later"), (11040, "need 13.0")],
)
def test_torch_for_a_gpu_that_cannot_run_is_not_fetched(
    driver: int | None, said: str, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.driver = driver
    with pytest.raises(SystemExit) as ended:
        environment.choose("demo", "cuda", BARE)
    assert ended.value.code == 1 and not bench.of_torch
    words = capsys.readouterr().err
    assert said in words and "Nothing was fetched" in words


def test_a_torch_that_drives_the_gpu_is_not_fetched_again(bench: Bench) -> None:
    bench.driver = 13000
    assert environment.choose("demo", "cuda", CUDA) == Path(CUDA.path)
    assert not bench.pip


@pytest.mark.parametrize("purpose", ["demo", "test", "dev", "docs"])
def test_no_network_is_named_and_what_is_at_hand_goes_on(
    purpose: str,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench.refuse = lambda command: True
    monkeypatch.setattr(environment, "look", lambda path, names=(): BARE if names else None)
    with pytest.raises(SystemExit) as ended:
        environment.main([purpose])
    words = capsys.readouterr().err
    assert ended.value.code == 1
    assert "Without a network" in words and "PIP_FIND_LINKS=DIR make" in words
    some = replace(BARE, modules=frozenset({"numpy", "pytest"}))
    monkeypatch.setattr(environment, "look", lambda path, names=(): some if names else None)
    if purpose in environment.EXACT:  # exact versions: nothing at hand will do
        return
    assert environment.main([purpose]) == 0
    told = capsys.readouterr()
    assert told.out == f"{BARE.path}\n"
    assert "pip could not install it, so what needs it is left out" in told.err


BLOCKER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
"""


def test_a_python_without_ensurepip_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(names=["ensurepip", "pip"]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hand = look(sys.executable, ["numpy", "pytest", "no_such_module"])
    assert hand and not hand.makes_pip and hand.pip is None
    assert hand.modules == {"numpy", "pytest"}
    with pytest.raises(SystemExit):
        Environment(tmp_path / "made", hand).ensure()
    words = capsys.readouterr().err
    major, minor = sys.version_info[:2]
    assert f"apt install python{major}.{minor}-venv" in words and "PYTHON=/path" in words
    assert not (tmp_path / "made").exists()


def test_what_is_made_beside_an_environment_sees_its_packages(tmp_path: Path) -> None:
    hand = look(sys.executable)
    assert hand is not None
    # pip of the Python at hand would do: without it this takes seconds less.
    over = Environment(tmp_path / "over", replace(hand, makes_pip=False, pip=(99, 0)), hand.sites)
    over.ensure()
    inside = look(over.path, ["numpy", "pytest"])
    assert inside and inside.modules == {"numpy", "pytest"} and inside.pip is not None
    assert Path(inside.path).parent == tmp_path / "over/bin"
    over.note("test")
    assert over.is_ours and over.has("test")
    assert not Environment(over.folder, hand, ["/other/site"]).has("test")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"setup": 1}', "null"])
def test_a_note_that_cannot_be_read_is_none(text: str, tmp_path: Path) -> None:
    one = Environment(tmp_path, BARE)
    (tmp_path / ".ready").write_text(text)  # make wrote an empty one, once
    assert not one.has("test")
    one.note("test")
    assert one.has("test")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_an_old_python_is_refused_by_make(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" != --version ] || echo Python 3.9.1\nexit 1\n')
    old.chmod(0o755)
    command = ["make", "-C", str(ROOT), "demo", f"PYTHON={old}"]
    environ: dict[str, Any] = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode != 0
    assert "needs Python 3.10 or later" in done.stderr and "Python 3.9.1" in done.stderr
