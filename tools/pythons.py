"""Interpreters, and the virtual environments that tools/environment.py makes. Chooses nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent

PROBE = """
import importlib.util as u, json, os, site, sys
def there(name):
    try:
        return u.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
torch = None
if there("torch"):
    places = u.find_spec("torch").submodule_search_locations or []
    files = [f for p in places if os.path.isdir(p + "/lib") for f in os.listdir(p + "/lib")]
    torch = "cuda" if any("torch_cuda" in f for f in files) else "cpu"
sites = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
pip = None
if there("pip"):
    import pip
    pip = [int(n) for n in pip.__version__.split(".")[:2] if n.isdigit()]
print(json.dumps({
    "path": sys.executable, "version": list(sys.version_info[:3]), "torch": torch, "pip": pip,
    "modules": [name for name in sys.argv[1:] if there(name)], "makes_pip": there("ensurepip"),
    "sites": [path for path in sites if os.path.isdir(path)],
}))
"""


@dataclass(frozen=True)
class Python:
    """An interpreter and what it can import. torch: None, "cpu" or "cuda", by its files."""

    path: str
    version: tuple[int, ...]
    torch: str | None
    pip: tuple[int, ...] | None
    modules: frozenset[str]
    makes_pip: bool
    sites: tuple[str, ...]

    @property
    def name(self) -> str:
        """Path and version, as messages have them."""
        return f"{self.path} (Python {'.'.join(map(str, self.version))})"

    def lacks(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that it cannot import."""
        return [name for name in names if name not in self.modules]


def look(path: Path | str, names: Sequence[str] = ()) -> Python | None:
    """The interpreter at `path` and which of `names` it imports, or None where it does not run."""
    try:
        done = subprocess.run(
            [str(path), "-c", PROBE, *names], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    found = json.loads(done.stdout.splitlines()[-1])
    return Python(
        found["path"],
        tuple(found["version"]),
        found["torch"],
        tuple(found["pip"]) if found["pip"] else None,
        frozenset(found["modules"]),
        found["makes_pip"],
        tuple(found["sites"]),
    )


class InstallError(Exception):
    """pip did not do it; the text is its last words."""


def say(text: str) -> None:
    """A line on stderr."""
    print(f"== {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    """Ends with exit code 1: what was asked, what was found, what to do."""
    print(text, file=sys.stderr, flush=True)
    sys.exit(1)


class Environment:
    """A virtual environment made here, of the Python `hand`, and pip for it.

    sites: folders of packages that it sees behind its own. `.ready` in it says what was installed,
    and is written after each step, so that an interrupted one is done again.
    """

    def __init__(self, folder: Path, hand: Python, sites: Sequence[str] = ()) -> None:
        self.folder = folder
        self.path = folder / "bin/python"
        self._hand = hand
        self._sites = list(sites)

    @property
    def is_ours(self) -> bool:
        """Whether it is there and was made here."""
        return (self.folder / ".ready").is_file()

    def _state(self) -> dict[str, Any]:
        texts = (ROOT / name for name in ("setup.py", "pyproject.toml"))
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in texts)).hexdigest()
        fresh: dict[str, Any] = {"setup": digest, "sites": self._sites, "has": []}
        try:
            state = json.loads((self.folder / ".ready").read_text())
            same = all(state[key] == fresh[key] for key in ("setup", "sites"))
        except (OSError, ValueError, KeyError, TypeError):
            same = False
        return state if same else fresh

    def has(self, what: str) -> bool:
        """Whether `note(what)` was said since setup.py last changed."""
        return what in self._state()["has"]

    def note(self, what: str) -> None:
        """Remember that `what` was done."""
        state = self._state()
        state["has"] = sorted({*state["has"], what})
        (self.folder / ".ready").write_text(json.dumps(state))

    def ensure(self, *, anew: bool = False) -> None:
        """Make it, if it is not there or its interpreter is gone; `anew`: in any case."""
        is_there = self.path.exists() and look(self.path)
        if is_there and not anew:
            return
        is_link = self.folder.is_symlink()  # to what may be somebody else's
        command = [self._hand.path, "-m", "venv"]
        command += ["--clear"] if self.folder.is_dir() and not is_link else []
        if not self._hand.makes_pip:
            if (self._hand.pip or (0,)) < (22, 3):
                fail(no_ensurepip(self._hand))
            command.append("--without-pip")
        say(f"{self.folder.name}: a virtual environment of {self._hand.name}")
        done = subprocess.run([*command, str(self.folder)], capture_output=True, text=True)
        if done.returncode:
            words = (done.stdout + done.stderr).strip()
            fail(f"{' '.join(command)} {self.folder} failed:\n{words}")
        if self._sites:
            (packages,) = self.folder.glob("lib/python*/site-packages")
            lines = (f"import site; site.addsitedir({site!r})\n" for site in self._sites)
            (packages / "packages_at_hand.pth").write_text("".join(lines))

    def bring(self, extra: str) -> None:
        """kernel_hub, editable, with what setup.py lists under `extra`."""
        self.ensure()
        if not self.has(extra):
            say(f"{self.folder.name}: kernel_hub, editable, with its extra '{extra}'")
            self.pip("install", "-e", f".[{extra}]")
            self.note(extra)

    def pip(self, *arguments: str, quiet: bool = True) -> None:
        """`pip …` for it. Raises InstallError with pip's last lines."""
        here = look(self.path)
        pip = [str(self.path), "-m", "pip"]
        if here is None or here.pip is None:
            pip = [self._hand.path, "-m", "pip", "--python", str(self.path)]
        elif here.pip < (21, 3):  # of before editable installs by pyproject.toml
            _run([*pip, "install", "--upgrade", "pip"], quiet=True)
        _run([*pip, *arguments], quiet=quiet)


def _run(command: list[str], *, quiet: bool) -> None:
    command += ["--disable-pip-version-check", "--no-input"]
    # Not as an option: pip runs itself again to fetch what a build needs.
    environment = {"PIP_RETRIES": "1", **os.environ}
    if not quiet:  # a long download shows how far it is
        if subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr).returncode:
            raise InstallError("   pip's words are above")
        return
    done = subprocess.run(
        [*command, "-q"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
        # Why it failed, before what failed because of it; each once.
        told = [line for line in lines if "ERROR:" in line]
        told += [line for line in lines if "connection broken" in line][-1:]
        told = list(dict.fromkeys(told or lines[-6:]))
        raise InstallError("\n".join(f"   {line[:160]}" for line in told))


def no_ensurepip(hand: Python) -> str:
    """What is missing where `python -m venv` cannot bring pip, and what to do."""
    major, minor = hand.version[:2]
    return (
        f"{hand.name} cannot make a virtual environment: it has no ensurepip, nor a pip of 22.3 "
        "or later.\nDo one of these, then run make again:\n"
        f"  apt install python{major}.{minor}-venv   (as root: Debian and Ubuntu keep ensurepip "
        "there)\n"
        "  make … PYTHON=/path/to/python   (another Python; one that has the packages needs none)"
    )
