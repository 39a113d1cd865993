"""Finds or makes the Python that a make target runs on, and prints its path (all else to stderr).

    python3 tools/environment.py demo|test|bench|dev|docs [--torch cuda|cpu]

The Python that runs this is "at hand". One that has torch is used with it: what it lacks is
installed in .venv-over, which sees its packages. Otherwise .venv is made. No other environment is
installed into. torch with CUDA, gigabytes, only comes when it is asked for, its size said first.
Needs Python 3.10 and nothing installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pythons import ROOT, Environment, InstallError, Python, fail, look, say

sys.path.insert(0, str(ROOT))

from kernel_hub import driver
from kernel_hub.collection.manifest import open_collection
from kernel_hub.errors import KernelHubError
from kernel_hub.measure import torch_builds

OWN, OVER = ROOT / ".venv", ROOT / ".venv-over"
# What a target imports, and the extra of setup.py that brings it.
_TESTS = ("hypothesis", "pytest", "pytest_timeout", "xdist", "rich", "setuptools")
NEEDS = {
    "demo": ("numpy",),
    "bench": ("numpy",),
    "test": ("numpy", *_TESTS, *(("zstandard",) if sys.version_info < (3, 14) else ())),
}
EXTRAS = {"demo": "cli", "bench": "bench", "test": "test", "dev": "dev", "docs": "docs"}
EXACT = ("dev", "docs")  # exact versions: nothing at hand will do
# Without these a target cannot start; without the others parts of it skip.
LEAST = {"demo": ("numpy",), "bench": ("numpy",), "test": ("numpy", "pytest")}


def cuda_version() -> int | None:
    """The CUDA version of a driver that sees a GPU (13000 = 13.0), or None."""
    try:
        found = driver.get()
    except KernelHubError:
        return None
    return found.version if found.device_count else None


def drives_the_gpu(python: Python) -> bool:
    """Whether its torch works with the driver here (it is imported, which takes seconds)."""
    code = "import torch; assert torch.cuda.is_available()"
    return subprocess.run([python.path, "-c", code], capture_output=True).returncode == 0


def bring_cpu_torch(own: Environment, *, asked: bool) -> None:
    """torch for the CPU from a folder of wheels or from PyTorch's CPU index.

    Never from an index that might send gigabytes of CUDA. Where neither has it the target goes on
    without, and looks again only when asked.
    """
    if own.has("torch") or (own.has("no torch") and not asked):
        return
    say("torch for the CPU: a wheel at hand, or about 0.2 GB to download")
    try:
        try:
            own.pip("install", "--no-index", "--no-deps", "torch")
        except InstallError:
            index = ("--index-url", torch_builds.CPU_INDEX)
            own.pip("install", "--timeout=15", "--no-deps", *index, "torch")
        found = look(own.path)
        if found and found.torch == "cuda":
            own.pip("uninstall", "--yes", "torch")
            raise InstallError("   the folder of wheels has one for CUDA: TORCH=cuda takes it")
        own.pip("install", "torch")  # what it depends on
    except InstallError as words:
        if asked:
            fail(f"TORCH=cpu: there is no torch for the CPU to be had:\n{words}")
        say(f"none for {own.path}: going on without torch (make … TORCH=cpu looks again)")
        own.note("no torch")
    else:
        own.note("torch")


def bring_cuda_torch(own: Environment, version: int) -> None:
    """The build of torch that fits the driver; what it costs is said before it is fetched."""
    build = torch_builds.build_for(version)
    entries = (e for archs in open_collection().manifest.cubins.values() for e in archs.values())
    needed = min(entry.minimum_driver for entry in entries)
    if build is None or version < needed:
        fail(
            f"TORCH=cuda: the driver here is of CUDA {_dotted(version)}; the shipped kernels need "
            f"{_dotted(needed)} or later, with any torch. Nothing was fetched: update the NVIDIA "
            "driver (580 is CUDA 13.0)."
        )
    say(f"torch with CUDA {build.cuda}, as the driver is of {_dotted(version)}, in {own.folder}:")
    say(torch_builds.cost(build, own.folder))
    free = torch_builds.free_gigabytes(own.folder)
    needs = build.download_gigabytes + build.disk_gigabytes
    if free < needs:
        fail(
            f"TORCH=cuda: {needs:.1f} GB are needed while it installs, {free:.1f} GB are free in "
            f"{own.folder.parent}. Nothing was fetched: make room, or use a checkout elsewhere."
        )
    index = _index_of(build, version, own)
    has_one = (here := look(own.path)) and here.torch  # for the CPU, or for another driver
    again = ["--force-reinstall"] if has_one else []
    try:
        own.pip("install", "--no-cache-dir", *again, *index, "torch", quiet=False)
    except InstallError as words:
        fail(f"TORCH=cuda: torch was not installed:\n{words}")
    got = look(own.path)
    if got is None or got.torch != "cuda":
        # pip takes an older build for the CPU from a folder of wheels where it finds a newer one's
        # dependencies nowhere.
        fail(
            f"TORCH=cuda: pip chose a torch without CUDA for {own.path}, from the folders or "
            "indexes it is configured to search (pip config list shows them).\n"
            "Leave them out: PIP_FIND_LINKS= make … TORCH=cuda"
        )


def _index_of(build: torch_builds.TorchBuild, version: int, own: Environment) -> list[str]:
    """pip's options for the index that has the build: PyTorch's, or PyPI where that has it too."""
    if os.environ.get("PIP_NO_INDEX"):
        return []  # a folder of wheels, whatever is in it
    indexes = [["--index-url", build.index]]
    if version >= torch_builds.PYPI_NEEDS:
        indexes.append([])  # what pip is configured to ask
    words = InstallError("")
    for index in indexes:
        try:
            own.pip("index", "versions", "torch", "--timeout=15", *index)
        except InstallError as error:
            words = error
        else:
            return index
    places = " nor ".join([build.index, *(["PyPI"] if len(indexes) > 1 else [])])
    fail(f"TORCH=cuda: no torch for {own.path} at {places}:\n{words}")


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def complete(python: Python, purpose: str, hand: Python, own: Environment) -> Path:
    """`python`, or an environment that sees its packages and has what else the target imports."""
    if own.is_ours and Path(python.path).parent == own.path.parent:
        own.bring(EXTRAS[purpose])
        return own.path
    missing = python.lacks(NEEDS[purpose])
    if not missing:
        return Path(python.path)
    say(f"{hand.name} has torch, but not {', '.join(missing)}")
    over = Environment(OVER, hand, hand.sites)
    if not over.has(EXTRAS[purpose]):
        over.ensure(anew=True)
    over.bring(EXTRAS[purpose])
    return over.path


def choose(purpose: str, torch: str | None, hand: Python) -> Path:
    """The path of the Python for `purpose`; everything that it needs is there afterwards."""
    own = Environment(OWN, hand)
    if purpose in EXACT:
        own.bring(EXTRAS[purpose])
        return own.path
    mine = look(own.path) if own.path.exists() else None
    with_torch = [python for python in (hand, mine) if python and python.torch]
    version = cuda_version()
    if torch == "cuda":
        if version is None:
            fail(
                "TORCH=cuda: found no NVIDIA driver that sees a GPU (kernel-hub doctor says more). "
                "Nothing was fetched; without a GPU, make demo does with torch for the CPU."
            )
        fitting = [one for one in with_torch if one.torch == "cuda" and drives_the_gpu(one)]
        if fitting:
            say(f"{fitting[0].name} has torch with CUDA: nothing to fetch")
            return complete(fitting[0], purpose, hand, own)
        own.bring(EXTRAS[purpose])
        bring_cuda_torch(own, version)
        return own.path
    if with_torch:
        # The one at hand first, but beside a GPU one whose torch has CUDA before one whose has not.
        best = max(with_torch, key=lambda one: version is not None and one.torch == "cuda")
        return complete(best, purpose, hand, own)
    if purpose == "bench":
        fail("make bench needs torch with CUDA: make bench TORCH=cuda")
    if version is not None and torch is None:
        # Nobody asked for torch: the GPU runs kernels on NumPy's data.
        if not hand.lacks(NEEDS[purpose]):
            return Path(hand.path)
        own.bring(EXTRAS[purpose])
        return own.path
    own.bring(EXTRAS[purpose])
    bring_cpu_torch(own, asked=torch == "cpu")
    return own.path


def no_packages(words: InstallError, purpose: str) -> str:
    """What to do where pip found nothing to install."""
    target = "lint" if purpose == "dev" else purpose
    ways = [
        f"PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR make {target}   (a folder of wheels; elsewhere: "
        f"pip download -d DIR setuptools '.[{EXTRAS[purpose]}]')",
        f"HTTPS_PROXY=http://HOST:PORT make {target}   (or PIP_INDEX_URL=, a mirror's)",
    ]
    if purpose not in EXACT:
        has = " and ".join(LEAST[purpose])
        ways.insert(0, f"make {target} PYTHON=/path/to/python   (one that has {has})")
    lines = "".join(f"\n  {way}" for way in ways)
    return (
        f"pip could not install what make {target} needs:\n{words}\n"
        f"Without a network, or behind a proxy, do one of these:{lines}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("purpose", choices=[*EXTRAS])
    parser.add_argument("--torch", choices=["cuda", "cpu"], help="fetch this build of torch")
    args = parser.parse_args(argv)
    hand = look(sys.executable, sorted({name for needs in NEEDS.values() for name in needs}))
    assert hand is not None, "this very interpreter does not run"
    try:
        path = choose(args.purpose, args.torch, hand)
    except InstallError as words:
        if args.purpose in EXACT or hand.lacks(LEAST[args.purpose]):
            fail(no_packages(words, args.purpose))
        missing = ", ".join(hand.lacks(NEEDS[args.purpose])) or "torch"
        say(f"{missing}: pip could not install it, so what needs it is left out:\n{words}")
        path = Path(hand.path)
    say(f"using {path}")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
