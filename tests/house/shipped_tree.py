"""A copy of what is shipped, with all cubins or a few, to build wheels and releases from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = (
    *("kernel_hub", "csrc", "cubins", "tests", "examples", "benchmarks", "docs", "native"),
    *("setup.py", "pyproject.toml", "MANIFEST.in", "Makefile", "build_cubins.sh", "LICENSE"),
    *("README.md", "README.zh-CN.md", "CHANGELOG.md", "mkdocs.yml", ".clang-format", "tools"),
)
FEW = ("launch_probe", "rms_norm", "rope")


def copy_to(
    folder: Path, cubins: tuple[str, ...] | None = None, without: tuple[str, ...] = ()
) -> Path:
    """Copy it to `folder`; cubins: those to keep, None: all. Compressing them takes most of a
    build's time. without: what to leave out of SHIPPED."""
    plain = shutil.ignore_patterns("__pycache__", ".*cache", "*.egg-info")

    def ignored(at: str, names: list[str]) -> set[str]:
        left = plain(at, names)
        if cubins is not None:
            left |= {n for n in names if n.endswith(".cubin") and n[:-6] not in cubins}
        return left

    for name in SHIPPED:
        source = ROOT / name
        if name in without:
            continue
        if source.is_dir():
            ignore = ignored if name == "cubins" else plain
            shutil.copytree(source, folder / name, ignore=ignore, dirs_exist_ok=True)
        elif source.exists():
            shutil.copy(source, folder / name)
    if cubins is not None:
        manifest = folder / "cubins/manifest.json"
        said = json.loads(manifest.read_text())
        said["cubins"] = {name: said["cubins"][name] for name in cubins}
        manifest.write_text(json.dumps(said))
    return folder
