"""`kernel-hub new NAME`: writes out a small package that ships its own kernel."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import sys
from importlib import resources
from pathlib import Path

from ..errors import KernelHubError
from . import _console

NAME = "new"
HELP = "write a package of your own kernel: .cu, build script, wrapper, test"
EXAMPLE = "kernel-hub new scale_add && cd scale_add && ./build_cubins.sh"

_PACKAGE_NAME = re.compile(r"[a-z]([a-z0-9_]*[a-z0-9])?")
# Template -> the file it becomes.
FILES = {
    "README.md.in": "README.md",
    "pyproject.toml.in": "pyproject.toml",
    "build_cubins.sh.in": "build_cubins.sh",
    "kernel.cu.in": "csrc/@NAME@.cu",
    "package.py.in": "@NAME@/__init__.py",
    "test_package.py.in": "test_@NAME@.py",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the package, its kernel and the folder")
    parser.add_argument("--into", type=Path, default=Path(), help="where to make the folder NAME")


def render(name: str) -> dict[str, str]:
    """Path inside the package's folder -> text. Raises KernelHubError for an unusable name."""
    if not _PACKAGE_NAME.fullmatch(name) or keyword.iskeyword(name) or name == "kernel_hub":
        raise KernelHubError(
            f"{name!r} cannot name a package: use lower-case letters, digits and underscores, "
            "starting with a letter"
        )
    if taken := _taken_by(name):
        raise KernelHubError(
            f"{name!r} cannot name a package: it would hide {taken}; choose another name"
        )
    folder = resources.files(f"{__package__.rpartition('.')[0]}.templates")
    return {
        path.replace("@NAME@", name): folder.joinpath(template)
        .read_text(encoding="utf-8")
        .replace("@NAME@", name)
        for template, path in FILES.items()
    }


def _taken_by(name: str) -> str:
    """The module that `import <name>` finds today, in words, or ''."""
    if name in sys.stdlib_module_names:
        return "Python's own module of that name"
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: a module that was made by hand
        spec = None
    # A plain folder (on the path, as the current one may be) is no module anybody installed.
    return f"the installed module at {spec.origin}" if spec is not None and spec.origin else ""


def write(name: str, into: Path) -> Path:
    """Write the package to `into`/NAME, which must not exist; returns that folder."""
    files = render(name)
    root = into / name
    if root.exists():
        raise KernelHubError(f"{root} exists already; nothing was written")
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if path.endswith(".sh"):
            file.chmod(0o755)
    return root


def run(args: argparse.Namespace) -> int:
    root = write(args.name, args.into)
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        _console.note(f"wrote {file}")
    call = f"{args.name}.{args.name}(numpy.arange(5))"
    _console.note(
        f"next:\n  cd {root}\n  ./build_cubins.sh\n"
        f'  python -c "import numpy, {args.name}; print({call})"',
        wraps=False,
    )
    return 0
