"""Which of PyTorch's CUDA builds a driver runs, and what it costs to fetch. Knows no other module.

tools/environment.py reads this before anything is installed: the standard library only.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Since torch 2.11 what PyPI itself has for Linux is built with CUDA 13.0.
PYPI_NEEDS = 13000


@dataclass(frozen=True)
class TorchBuild:
    """torch of one CUDA version with all it depends on; gigabytes are 10**9 bytes."""

    cuda: str
    driver: int
    download_gigabytes: float
    disk_gigabytes: float

    @property
    def index(self) -> str:
        """The package index that has it."""
        return f"https://download.pytorch.org/whl/cu{self.cuda.replace('.', '')}"


# Newest first; a driver runs builds of its own CUDA version and, within 12.x, of any. Sizes of what
# pip chose for x86-64 Linux in 2026 (torch 2.14.1, 2.10.0, 2.7.1), wheels and their contents.
BUILDS = (
    TorchBuild("13.0", 13000, 3.0, 5.5),
    TorchBuild("12.8", 12080, 4.1, 7.2),
    TorchBuild("12.6", 12000, 3.0, 5.3),
)


def build_for(driver_version: int) -> TorchBuild | None:
    """The newest build for a driver of this CUDA version (13000 = 13.0), None below 12.0."""
    return next((build for build in BUILDS if driver_version >= build.driver), None)


def free_gigabytes(folder: Path) -> float:
    """Free space where `folder` is, or will be."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free / 1e9


def cost(build: TorchBuild, folder: Path) -> str:
    """'about 3.0 GB to download, 5.5 GB on disk (40.2 GB are free)'."""
    return (
        f"about {build.download_gigabytes:.1f} GB to download, {build.disk_gigabytes:.1f} GB on "
        f"disk ({free_gigabytes(folder):.1f} GB are free)"
    )
