"""Builds data/*.fatbin from data/client.cu: `python tests/integrations/make_data.py`, with nvcc."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kernel_hub.compilers.nvcc import find_nvcc

DATA = Path(__file__).parent / "data"
IMAGES = {"client_sm80_sm90": (80, 90), "client_sm75_sm86": (75, 86)}


def main() -> None:
    """Write the images: machine code only, as the published ones."""
    for name, archs in IMAGES.items():
        targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        flags = ["-fatbin", "-no-compress", *targets, "-o", f"{name}.fatbin"]
        subprocess.run([find_nvcc().path, *flags, "client.cu"], cwd=DATA, check=True)


if __name__ == "__main__":
    main()
