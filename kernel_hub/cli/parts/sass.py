"""Disassembly through NVIDIA's nvdisasm, where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ...errors import KernelHubError

INSTALL = "pip install nvidia-cuda-nvdisasm"
_SECTION = re.compile(r"^//-+ \.text\.(\S+)\s+-+\n", re.MULTILINE)


def find_nvdisasm() -> str | None:
    """nvdisasm on PATH, in this Python's packages, or in /usr/local/cuda."""
    places = [shutil.which("nvdisasm")]
    places += [str(p) for path in sys.path for p in Path(path).glob("nvidia/*/bin/nvdisasm")]
    places += ["/usr/local/cuda/bin/nvdisasm"]
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def disassemble(cubin: bytes, function: str | None = None) -> str:
    """The SASS of `cubin`, or of one function of it. Raises KernelHubError without nvdisasm."""
    tool = find_nvdisasm()
    if tool is None:
        raise KernelHubError(
            "--sass needs nvdisasm, which is not on PATH, in this Python's packages or in "
            f"/usr/local/cuda: {INSTALL}"
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-c", file.name], capture_output=True, text=True, errors="replace", check=False
        )
    if done.returncode:
        raise KernelHubError(f"{tool} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout if function is None else only(done.stdout, function)


def only(sass: str, function: str) -> str:
    """The part of nvdisasm's output that is `function`'s code."""
    parts = _SECTION.split(sass)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    return bodies.get(function, "")
