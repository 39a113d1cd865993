"""Builds data/fmha_*.cubin from tests/gpu/fmha_stand_in.cu: needs nvcc, once they change."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kernel_hub.compilers.nvcc import find_nvcc

HERE = Path(__file__).parent
STRUCTS = {
    "stand_in": "CURRENT",
    "without_sinks": "WITHOUT_SINKS",
    "edge": "EDGE",
    "640": "P640",
    "576": "P576",
    "long_512": "LONG512",
    "512": "P512",
}


def main() -> None:
    """Write one cubin a struct: the kernels' names, and what they always read."""
    for name, struct in STRUCTS.items():
        flags = ["-cubin", "-arch=sm_90a", "-std=c++17", "-DNAMES_ONLY", f"-DSTRUCT={struct}"]
        target = HERE / f"data/fmha_{name}.cubin"
        # By its bare name, as assertions hold the path that it was given by.
        command = [find_nvcc().path, *flags, "-o", str(target), "fmha_stand_in.cu"]
        subprocess.run(command, cwd=HERE.parent / "gpu", check=True)


if __name__ == "__main__":
    main()
