"""`kernel-hub new NAME`: writes out a small package that ships its own kernel."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from ..errors import KernelHubError
from .parts import console

NAME = "new"
HELP = "write a package of your own kernel: .cu, build script, wrapper, test; or an op of torch"
EXAMPLE = "kernel-hub new scale_add && cd scale_add && ./build_cubins.sh"

_PACKAGE_NAME = re.compile(r"[a-z]([a-z0-9_]*[a-z0-9])?")


class Kind(NamedTuple):
    """What is written: template -> the file it becomes, and the words that differ."""

    kernel: str
    package: str
    test: str
    words: Mapping[str, str]

    @property
    def files(self) -> dict[str, str]:
        """Template -> the file it becomes."""
        return {
            "README.md.in": "README.md",
            "pyproject.toml.in": "pyproject.toml",
            "build_cubins.sh.in": "build_cubins.sh",
            self.kernel: "csrc/@NAME@.cu",
            self.package: "@NAME@/__init__.py",
            self.test: "test_@NAME@.py",
        }


NUMPY = Kind(
    "kernel.cu.in",
    "package.py.in",
    "test_package.py.in",
    {
        "OPTION": "",
        "CALL": "import numpy, @NAME@; print(@NAME@.@NAME@(numpy.arange(5)))",
        "RESULT": "[1. 3. 5. 7. 9.]",
        "WRAPPER": "the typed wrapper",
        "TESTED": "without a GPU it checks the signature alone.",
        "DEPENDENCIES": '"kernel_hub"',
    },
)
TORCH = Kind(
    "kernel_torch.cu.in",
    "package_torch.py.in",
    "test_package_torch.py.in",
    {
        "OPTION": "--torch ",
        "CALL": "import torch, @NAME@; print(@NAME@.@NAME@(torch.arange(5.0)))",
        "RESULT": "tensor([1., 3., 5., 7., 9.])",
        "WRAPPER": "the op: GPU, CPU, autograd, torch.compile",
        "TESTED": "without a GPU it tests the path on the CPU.",
        "DEPENDENCIES": '"kernel_hub", "torch>=2.4"',
    },
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the package, its kernel and the folder")
    parser.add_argument(
        "--torch", action="store_true", help="an op of torch: CPU path, autograd, torch.compile"
    )
    parser.add_argument("--into", type=Path, default=Path(), help="where to make the folder NAME")


def render(name: str, kind: Kind = NUMPY) -> dict[str, str]:
    """Path inside the package's folder -> text. Raises KernelHubError for an unusable name."""
    if keyword.iskeyword(name):
        raise KernelHubError(f"{name!r} cannot name a package: it is a word of Python's own")
    if not _PACKAGE_NAME.fullmatch(name):
        raise KernelHubError(
            f"{name!r} cannot name a package: use lower-case letters, digits and underscores, "
            "starting with a letter and not ending with an underscore"
        )
    if taken := _taken_by(name):
        raise KernelHubError(
            f"{name!r} cannot name a package: it would hide {taken}; choose another name"
        )
    folder = resources.files(f"{__package__.rpartition('.')[0]}.templates")
    written = {}
    for template, path in kind.files.items():
        text = folder.joinpath(template).read_text(encoding="utf-8")
        for word, value in kind.words.items():
            text = text.replace(f"@{word}@", value)
        written[path.replace("@NAME@", name)] = text.replace("@NAME@", name)
    return written


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


def write(name: str, into: Path, kind: Kind = NUMPY) -> Path:
    """Write the package to `into`/NAME, which must not exist; returns that folder."""
    files = render(name, kind)
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
    kind = TORCH if args.torch else NUMPY
    root = write(args.name, args.into, kind)
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        console.note(f"wrote {file}")
    call = kind.words["CALL"].replace("@NAME@", args.name)
    console.note(f'next:\n  cd {root}\n  ./build_cubins.sh\n  python -c "{call}"', wraps=False)
    return 0
