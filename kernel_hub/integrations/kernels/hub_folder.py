"""A repository of Hugging Face's hub: the folder that `kernels.get_local_kernel` loads.

DIR/build/torch-cuda/metadata.json      name, license, architectures
DIR/build/torch-cuda/__init__.py        the ops, flash-attn's names, `layers`
DIR/build/torch-cuda/_kernel_hub/       this package's runtime and ops, cubins inside
DIR/build/torch-cpu/                    the same without cubins, for a torch without CUDA
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ... import __version__
from ...collection.entries import OWN_PACKAGE
from ...collection.manifest import Collection, open_collection
from ...collection.resolve import parse_target
from ...errors import CubinNotFoundError, KernelHubError

NAME, LICENSE = "kernel-hub", "Apache-2.0"
_INSIDE = "_kernel_hub"
# What only a user at a terminal, a maker of kernels or another door needs.
_LEFT_OUT = (
    *("cli", "formats", "measure", "templates", "testing", "build.py", "__main__.py"),
    *("integrations/cpm_kernels", "integrations/sdpa.py", "cubins"),
)
_ENTRY = f'''"""kernel_hub {__version__}, built for Hugging Face's kernels package."""

from .{_INSIDE} import Kernel, registry
from .{_INSIDE}.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from .{_INSIDE}.integrations.kernels import layers
from .{_INSIDE}.ops import *
from .{_INSIDE}.ops import __all__ as _ops

__all__ = [
    *_ops,
    "Kernel",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "layers",
    "registry",
]
'''
_README = f"""---
library_name: kernels
license: apache-2.0
---

# kernel_hub {__version__}

CUDA kernels as prebuilt cubins, and ops on torch tensors that launch them. Needs a driver of CUDA
13.0 or newer and nothing else: no compiler, no particular torch.

```python
from pathlib import Path
from kernels import get_local_kernel

kernel_hub = get_local_kernel(Path("THIS FOLDER"))
out = kernel_hub.rms_norm(x, weight)
```
"""


def write(to: Path, advance: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Write the repository into the folder `to`, which must not hold a build; the builds' folders.

    advance: hears of each build as it begins. Raises KernelHubError where one lies there, or this
    package is no folder; CubinNotFoundError where its cubins are not built.
    """
    package = Path(__file__).resolve().parents[2]
    if not package.is_dir():
        raise KernelHubError(f"{package} is no folder: install the package unzipped to export it")
    if (to / "build").exists():
        raise KernelHubError(f"{to / 'build'} exists already; nothing was written")
    collection = open_collection(OWN_PACKAGE)
    if not isinstance(collection.root, Path):
        raise CubinNotFoundError(f"{collection.root} is no folder that can be copied")
    builds = []
    for backend in ("cuda", "cpu"):
        advance(f"torch-{backend}")
        build = to / "build" / f"torch-{backend}"
        inside = build / _INSIDE
        for file in _files(package):
            _copy(package / file, inside / file)
        if backend == "cuda":
            for cubin in _shipped(collection):
                _copy(collection.root / cubin, inside / "cubins" / cubin)
        (build / "__init__.py").write_text(_ENTRY, encoding="utf-8")
        about = {
            "id": f"_{NAME.replace('-', '_')}_{backend}_{_digest(build)}",
            "name": NAME,
            "version": 1,
            "license": LICENSE,
            "python-depends": [],
            "backend": _backend(backend, collection),
        }
        text = json.dumps(about, indent=2) + "\n"
        (build / "metadata.json").write_text(text, encoding="utf-8")
        builds.append(build)
    (to / "README.md").write_text(_README, encoding="utf-8")
    return builds


def _files(package: Path) -> Iterator[Path]:
    """Of the package, in order, but for what is left out."""
    left_out = [package / name for name in _LEFT_OUT]
    for path in sorted(package.rglob("*")):
        is_code = path.is_file() and path.suffix in (".py", ".pyi", ".json", ".so", ".typed")
        if is_code and not any(path.is_relative_to(each) for each in left_out):
            yield path.relative_to(package)


def _shipped(collection: Collection) -> Iterator[str]:
    """The manifest and the files that it names."""
    yield "manifest.json"
    for entries in collection.manifest.cubins.values():
        yield from (entry.file for entry in entries.values())


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _digest(folder: Path) -> str:
    """Of all files in it and their names: two builds that differ are two modules."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:12]


def _backend(backend: str, collection: Collection) -> dict[str, object]:
    if backend == "cpu":
        return {"type": "cpu"}
    entries = (e for archs in collection.manifest.cubins.values() for e in archs.values())
    capabilities = {parse_target(entry.target)[:2] for entry in entries}
    return {"type": "cuda", "archs": [f"{major}.{minor}" for major, minor in sorted(capabilities)]}
