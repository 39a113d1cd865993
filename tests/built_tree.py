"""A throwaway csrc/ and what nvcc builds of it, for tests of the builder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kernel_hub import build
from kernel_hub.collection.manifest import CubinEntry, Manifest
from kernel_hub.compilers.nvcc import find_nvcc
from kernel_hub.errors import KernelHubError

try:
    NVCC = find_nvcc()
    REASON = ""
except KernelHubError as error:
    REASON = str(error)
needs_nvcc = pytest.mark.skipif(bool(REASON), reason=REASON)

# A kernel that no header of CUDA takes a second to read for.
PLAIN = '#include "copy.cuh"\nextern "C" __global__ void copy(float* scale) { *scale = kSame; }\n'
PLAIN_HEADER = "constexpr float kSame = 1;\n"


class Tree:
    """A throwaway csrc/ and the cubins/ built from it."""

    def __init__(self, root: Path) -> None:
        self.csrc = root / "csrc"
        self.out = root / "cubins"
        (self.csrc / "include").mkdir(parents=True)

    def write(self, name: str, text: str) -> Path:
        path = self.csrc / name
        path.write_text(text)
        return path

    def with_copy(self) -> Tree:
        """Itself, with a source and a header of its own."""
        self.write("copy.cu", PLAIN)
        self.write("include/copy.cuh", PLAIN_HEADER)
        return self

    def build(self, *args: str) -> int:
        return build.main(["--csrc", str(self.csrc), "--out", str(self.out), *args])

    def manifest(self) -> Manifest:
        return Manifest.from_json((self.out / "manifest.json").read_text(), where="manifest.json")

    def entry(self, name: str, arch: str) -> CubinEntry:
        return self.manifest().cubins[name][arch]

    def digests(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.out)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.out.rglob("*"))
            if path.is_file()
        }
