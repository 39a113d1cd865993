"""The rules of docs/architecture.md: who may import whom, and what happens at import (nothing)."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernel_hub

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kernel_hub"

MAY_IMPORT_TORCH = {"ops", "testing", "measure", "integrations", "engine", "flash_attn"}
TORCH_AT_TOP = {"ops", "testing", "measure", "integrations", "engine", "flash_attn"}
MAX_LINES = 400

DOC = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
NAME = r"`([\w/]+?)(?:\.py|/)?`"
# (modules, holds, may import): the others of a row are parts of its first module.
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in DOC.splitlines()
    if line.startswith("| `")
]
PARTS = {part: re.findall(NAME, row[0])[0] for row in ROWS for part in re.findall(NAME, row[0])}
UNITS = list(dict.fromkeys(PARTS.values()))
ALLOWED: dict[str, set[str] | None] = {}  # None: anything
for (_, _, _cell), _unit in zip(ROWS, UNITS, strict=True):
    if _cell == "anything":
        ALLOWED[_unit] = None
    elif _cell == "all above":
        ALLOWED[_unit] = set(UNITS[: UNITS.index(_unit)])
    else:
        ALLOWED[_unit] = set(_cell.split(", ")) - {"nothing", ""}

MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "templates" not in p.parts)
NAMES = {
    ".".join(("kernel_hub", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in MODULES
}


def unit_of(path: Path) -> str:
    """The module or folder that the document has a row for, the innermost."""
    place = path.relative_to(PACKAGE).with_suffix("")
    for known in (place, *place.parents):
        if known.as_posix() in PARTS:
            return PARTS[known.as_posix()]
    return place.parts[0]


@functools.cache
def imports(path: Path) -> list[tuple[str, bool, int]]:
    """(absolute dotted name, at module level, line); what only type checkers see is left out."""
    parts = ("kernel_hub", *path.relative_to(PACKAGE).with_suffix("").parts)
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))

    def walk(node: ast.AST, top: bool) -> Iterator[tuple[str, bool, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, top, child.lineno
            elif isinstance(child, ast.ImportFrom):
                base = ".".join(parts[: len(parts) - child.level]) if child.level else ""
                module = ".".join(filter(None, (base, child.module)))
                for alias in child.names:
                    yield f"{module}.{alias.name}", top, child.lineno
            inner = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from walk(child, top and not inner)

    return list(walk(tree, True))


def own_imports(path: Path) -> Iterator[tuple[Path, str, int]]:
    """(module, dotted name, line) for each import of the package's own."""
    for name, _, line in imports(path):
        parts = name.split(".")
        if parts[0] != "kernel_hub":
            continue
        if len(parts) == 2 and parts[1] in kernel_hub._HOME:  # what `kernel_hub` finds lazily
            parts = ["kernel_hub", kernel_hub._HOME[parts[1]], parts[1]]
        while ".".join(parts) not in NAMES:
            parts.pop()
        if len(parts) > 1:  # `kernel_hub.__version__` is anybody's
            yield NAMES[".".join(parts)], name, line


def test_every_module_is_in_the_document_and_every_rule_names_modules() -> None:
    tops = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES}
    assert not sorted(tops - PARTS.keys()), "no row of the table in docs/architecture.md names them"
    there = {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*")}
    assert not sorted(PARTS.keys() - there), "rows of what is not there"
    used = set().union(*(rule or set() for rule in ALLOWED.values()))
    assert not sorted(used - ALLOWED.keys()), "'may import' names the first module of a row"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down_the_layers(path: Path) -> None:
    unit = unit_of(path)
    allowed = ALLOWED.get(unit, set())
    if allowed is None:
        return
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}; {unit} may import {sorted(allowed)}"
        for module, name, line in own_imports(path)
        if (other := unit_of(module)) != unit and other not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def without_ends(needs: dict[Path, set[Path]]) -> dict[Path, set[Path]]:
    """What is left of a graph after its ends, the ends of what is left, and so on are gone."""
    left = dict(needs)
    while ends := [path for path, others in left.items() if not others & left.keys()]:
        for path in ends:
            del left[path]
    return left


def test_no_module_needs_itself() -> None:
    """No circle of imports, those inside functions included."""
    needs = {path: {module for module, _, _ in own_imports(path)} - {path} for path in MODULES}
    left = without_ends(needs)
    needed_by = {path: {other for other in left if path in needs[other]} for path in left}
    circles = [
        f"{path.relative_to(ROOT)} imports {module.relative_to(ROOT)}"
        for path in without_ends(needed_by)
        for module in sorted(needs[path] & without_ends(needed_by).keys())
    ]
    assert not circles, "imports in a circle:\n" + "\n".join(circles)


def test_a_name_with_an_underscore_stays_in_its_folder() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in MODULES
        for module, name, line in own_imports(path)
        if re.match(r"_(?!_)", module.stem) and module.parent != path.parent
    ]
    assert not wrong, "\n".join(wrong)


# A folder of peers of one kind: texts to fill in.
PEERS = {"kernel_hub/templates"}
MAX_FILES, MAX_TOP_MODULES = 16, 10


def test_rooms_are_small() -> None:
    rooms: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            rooms.setdefault(str(path.parent.relative_to(ROOT)), []).append(path.name)
    large = {room: len(files) for room, files in rooms.items() if len(files) > MAX_FILES}
    assert large.keys() <= PEERS, f"over {MAX_FILES} files, make rooms of them: {large}"
    assert large.keys() == PEERS, f"no longer large: {PEERS - large.keys()}"
    tops = sorted(name for name in rooms["kernel_hub"] if name.endswith(".py"))
    assert len(tops) <= MAX_TOP_MODULES, f"modules of no room: {tops}"


# What others' programs and users call so, each in a room of its own.
TWICE = {"Attention", "Body", "Kernel", "KernelFunction", "Problem"}


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    assert twice.keys() <= TWICE, {n: where for n, where in twice.items() if n not in TWICE}
    assert twice.keys() >= TWICE, f"no longer twice: {TWICE - twice.keys()}"


# Where the sources of a room's ops lie, if not in the room of the same name.
SOURCES_OF = {"projection": "matmul"}  # its kernels are products with an ending of their own
OPS = sorted(
    {module for module, _, _ in own_imports(PACKAGE / "ops/__init__.py")} - {PACKAGE / "errors.py"}
)


@pytest.mark.parametrize("path", OPS, ids=lambda p: p.stem)
def test_an_op_is_whole_and_knows_no_other(path: Path) -> None:
    """Kernel, op and test in rooms of one name; a benchmark; a row of the README."""
    assert not {module for module, _, _ in own_imports(path)} & (set(OPS) - {path})
    room, op = path.parent.name, path.stem
    source = f"csrc/{SOURCES_OF.get(room, room)}/{op}.cu"
    files = source, f"tests/ops/{room}/test_{op}.py", f"benchmarks/bench_{op}.py"
    missing = [file for file in files if not (ROOT / file).is_file()]
    if f"`ops.{op}`" not in (ROOT / "README.md").read_text(encoding="utf-8"):
        missing.append(f"`ops.{op}` in README.md")
    assert not missing, "docs/adding_a_kernel.md says what is in them"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_stays_where_it_may_be(path: Path) -> None:
    unit = unit_of(path).split("/")[0]
    for name, top, line in imports(path):
        if name.split(".")[0] == "torch":
            assert unit in MAY_IMPORT_TORCH, f"{path}:{line} imports torch"
            assert unit in TORCH_AT_TOP or not top, f"{path}:{line} imports torch at module level"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_driver_layer_opens_a_library(path: Path) -> None:
    """But `measure` (the contenders), the C launcher and `image.demangle` (libstdc++)."""
    openers = {"CDLL", "PyDLL", "WinDLL", "LibraryLoader", "cdll", "pydll", "LoadLibrary"}
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Attribute, ast.Name))
    }
    allowed = unit_of(path) in ("driver", "measure") or path.stem in (
        "c_launcher",
        "c_structs",
        "demangle",
    )
    assert allowed or not used & openers


def test_one_module_of_the_ops_knows_compute_capabilities() -> None:
    written = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in (PACKAGE / "ops").rglob("*.py")
        for found in re.finditer(r"\((?:8, [0679]|9, 0)\)", path.read_text(encoding="utf-8"))
        if path != PACKAGE / "ops/core/device.py"
    ]
    assert not written, "name it in ops/core/device.py: " + "; ".join(written)


SOURCES = sorted(
    path
    for folder in ("kernel_hub", "csrc", "native", "tests", "benchmarks", "examples", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cu", ".cuh", ".c", ".h", ".sh")
)


def test_no_file_is_long() -> None:
    long = {
        str(path.relative_to(ROOT)): num_lines
        for path in SOURCES
        if (num_lines := path.read_text(encoding="utf-8").count("\n")) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines, split by purpose: {long}"


# Runs in a process of its own; prints what importing kernel_hub did.
IMPORT_PROBE = """
import json, sys, time
import numpy
seen = []
watched = ("open", "ctypes.dlopen", "subprocess.Popen", "os.system", "os.fork", "socket.connect",
           "os.exec", "os.posix_spawn", "glob.glob")
def hook(event, args):
    if event in watched:
        seen.append([event, str(args[0])])
sys.addaudithook(hook)
before = set(sys.modules)
started = time.perf_counter()
import kernel_hub
milliseconds = (time.perf_counter() - started) * 1e3
events = list(seen)
print(json.dumps({"ms": milliseconds, "events": events, "new": sorted(set(sys.modules) - before)}))
"""


def probe_import() -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_import_does_nothing() -> None:
    result = probe_import()
    events = [
        (event, target)
        for event, target in result["events"]  # type: ignore[attr-defined]
        if not (event == "open" and target.endswith((".py", ".pyc")))
        and not (event == "ctypes.dlopen" and target in ("None", ""))
    ]
    assert not events, "importing kernel_hub opened files, libraries or processes"
    new = set(result["new"])  # type: ignore[call-overload]
    heavy = {"torch", "rich", "matplotlib", "cupy", "triton", "importlib.resources", "asyncio"}
    own = {"kernel_hub.build", "kernel_hub.cli", "kernel_hub.ops", "kernel_hub.measure"}
    assert not new & (heavy | own)


def test_import_is_quick() -> None:
    best = min(float(probe_import()["ms"]) for _ in range(5))  # type: ignore[arg-type]
    assert best <= 30, f"import kernel_hub takes {best:.1f} ms beyond NumPy's own import"


def test_the_builder_needs_no_numpy() -> None:
    code = "import sys, kernel_hub.build; print(sorted(m for m in sys.modules if 'numpy' in m))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
