"""Tries formats.triton on the kernels of other people's packages: compile, load, export, read as C.

    python tests/formats/survey_triton.py OUT.json FOLDER…

FOLDER: unpacked packages. Needs Triton, gcc and cuda.h, no GPU. Every @triton.jit function of every
file is compiled for sm90 with arguments guessed from their names; what Triton itself refuses of
that says nothing here, what it compiles must go through. Modules that cannot be imported are
stood in for, so that a file needs nothing but Triton.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

SECONDS = int(os.environ.get("SURVEY_SECONDS", "60"))  # a kernel
KEPT = ("triton", "kernel_hub", "numpy", "torch", "tvm_ffi")
BOOLEAN = re.compile(
    r"^(IS|HAS|USE|STORE|LOAD|ENABLE|APPLY|NEED|DO|EVEN|CAUSAL|SAVE|OUTPUT|ADD)_|CAUSAL"
)
NUMBER = re.compile(
    r"stride|^n_|num|size|len|dim|^[A-Z]{1,2}$|seqlen|rows?$|cols?$|^n$|max|count|heads|batch|width|"
    r"height|vocab|hidden|layers|topk|groups?$|step|start|end|index$|rank|tokens"
)
FLOAT = re.compile(
    r"eps|scale|alpha|beta|gamma_?$|lambda|dropout|^p$|temperature|smoothing|cap|coef|lr"
)
DTYPE = re.compile(r"dtype|DTYPE|_TYPE$", re.IGNORECASE)
GUESSES = [
    {"pointer": pointer, "block": block, "flag": flag, "other": other}
    for pointer, block, flag, other in (
        *(("*fp16", 32, False, "i32"), ("*fp32", 32, False, "fp32"), ("*fp16", 64, True, "i32")),
        *(("*i32", 32, False, "i32"), ("*bf16", 64, True, "*"), ("*fp32", 16, False, "i32")),
    )
]


class LateError(BaseException):
    """The kernel's time is up. No part of the program takes it for an error of its own."""


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module that is not there, as a MagicMock."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        top = name.partition(".")[0]
        known = top in {*KEPT, *sys.stdlib_module_names} or top.startswith("_")
        if known or re.search(r"npu|cann|xpu|hip|musa|mlu", name):  # no other vendor's machine
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        made = MagicMock(name=spec.name)
        made.__path__, made.__name__, made.__spec__, made.__all__ = [], spec.name, spec, []
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it stands for what is not there."""


class Bare(ModuleType):
    """A package whose own `__init__` does not run here: its modules do."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def open_package(folder: Path) -> None:
    """The package itself where it can be imported; else its folders alone."""
    try:
        importlib.import_module(folder.name)
        return
    except BaseException:  # noqa: BLE001 (whatever it asks of a machine)
        for name in [n for n in sys.modules if n.partition(".")[0] == folder.name]:
            del sys.modules[name]
    for init in [folder / "__init__.py", *folder.rglob("__init__.py")]:
        name = ".".join(init.parent.relative_to(folder.parent).parts)
        sys.modules[name] = made = Bare(name)
        made.__path__ = [str(init.parent)]


def kernels(folder: Path) -> Iterator[tuple[str, Any]]:
    """(file:name, JITFunction) of every one in a folder."""
    import triton

    open_package(folder)
    for path in sorted(folder.rglob("*.py")):
        if "@triton.jit" not in path.read_text(errors="replace"):
            continue
        spec = importlib.util.spec_from_file_location(
            ".".join(path.relative_to(folder.parent).with_suffix("").parts), path
        )
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:  # noqa: BLE001 (whatever a file does without its package)
            traceback.print_exc(limit=-1)
        for name, found in list(vars(module).items()):
            while not isinstance(found, triton.JITFunction) and hasattr(found, "fn"):
                if isinstance(found, MagicMock):
                    break
                found = found.fn
            if not isinstance(found, triton.JITFunction) or found.fn.__module__ != spec.name:
                continue
            if re.search(
                r"store\(|atomic_\w+\(|scatter", found.src
            ):  # else no kernel, but a part of one
                yield f"{path.relative_to(folder.parent)}:{name}", found


class Pointers(ast.NodeVisitor):
    """Names that a function loads from or stores to: the first term of such an address."""

    def __init__(self, text: str) -> None:
        self.assigned: dict[str, ast.expr] = {}
        self.found: set[str] = set()
        self.described: set[str] = set()  # tensor descriptors, which load and store themselves
        tree = ast.parse(textwrap.dedent(text))
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.assigned.setdefault(node.targets[0].id, node.value)
        self.visit(tree)

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        first = [*node.args, *(k.value for k in node.keywords if k.arg in ("pointer", "base"))]
        if first and (name in ("load", "store", "make_block_ptr") or name.startswith("atomic_")):
            self._note(first[0], 0)
        if first and name.endswith("tensor_descriptor"):
            self._note(first[0], 0)
        if name in ("load", "store", "gather") and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id not in ("tl", "gl"):
                self.described.add(owner.id)
        self.generic_visit(node)

    def _note(self, node: ast.expr, depth: int) -> None:
        while isinstance(node, (ast.BinOp, ast.Attribute, ast.Subscript, ast.Call)):
            if isinstance(node, ast.BinOp):
                node = node.left
            elif isinstance(node, ast.Call):
                node = node.func
            else:
                node = node.value
        if isinstance(node, ast.Name) and depth < 20:
            self.found.add(node.id)
            if node.id in self.assigned:
                self._note(self.assigned[node.id], depth + 1)


def guessed(jit: Any, guess: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """A signature and constants that such names may have."""
    import triton.language as tl

    used = Pointers(jit.src)
    signature, constants = {}, {}
    for param in jit.params:
        name = param.name
        if not param.is_constexpr:
            integers = re.search(r"seqlens|indices|idx|slot|table", name)
            if name in used.described:
                signature[name] = "tensordesc<fp16[64,64]>"
            elif name in used.found or "ptr" in name.lower():
                signature[name] = f"{'*i64' if integers else guess['pointer']}:16"
            elif FLOAT.search(name.lower()):
                signature[name] = "fp32"
            elif NUMBER.search(name) or name.isupper():
                signature[name] = "i32:16" if "stride" in name and guess["flag"] else "i32"
            else:
                signature[name] = guess["other"].replace("*", guess["pointer"] + ":16")
        elif name in ("num_warps", "num_stages", "num_ctas"):
            continue  # the compiler's own
        elif DTYPE.search(name):
            constants[name] = tl.float16 if guess["pointer"] == "*fp16" else tl.float32
        elif BOOLEAN.search(name) or (name.islower() and name.startswith(("is_", "has_", "use_"))):
            constants[name] = guess["flag"]
        elif "num_" in name.lower() and "stage" in name.lower():
            constants[name] = 2
        else:
            constants[name] = guess["block"]
    return signature, constants


def tried(jit: Any, cuda_h: str) -> tuple[str, str]:
    """(outcome, reason) of a kernel: the first guess that Triton compiles counts."""
    from kernel_hub.errors import CompileError, KernelHubError
    from kernel_hub.formats import c_export, triton

    refusal = ""
    for guess in GUESSES:
        signature, constants = guessed(jit, guess)
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["TRITON_CACHE_DIR"] = f"{scratch}/cache"
            folder = Path(scratch) / "collection"
            try:
                name = triton.compile(jit, signature, constexprs=constants, arch="sm90", out=folder)
            except CompileError as error:
                if "shared memory" in str(error) and "Error" not in (error.log or ""):
                    refusal = "needs too much shared memory"
                elif error.log and "kernel_hub" not in error.log:
                    refusal = error.log.strip().splitlines()[-1][:160]
                else:
                    return "failed", f"compile: {error}"[:400]
                continue
            except KernelHubError as error:
                return "failed", f"compile: {type(error).__name__}: {error}"[:400]
            try:
                f = triton.collection(folder).function(name, arch="sm90")
                (cubin,) = Path(f"{scratch}/cache").rglob("*.cubin")
                loaded = triton.load(cubin)
                if [a.type for a in loaded.arguments] != [a.type for a in f.arguments]:
                    return "failed", f"load: {loaded.signature} is not {f.signature}"
                out = Path(scratch) / "c"
                c_export.export({"kernel": loaded}, out / "loaded")
                c_export.export({"kernel": f}, out / "built", dlpack=True)
                for source in out.rglob("*.c"):
                    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{cuda_h}"]
                    done = subprocess.run(
                        [*command, "-fsyntax-only", source], capture_output=True, text=True
                    )
                    if done.returncode:
                        return "failed", f"C: {done.stderr[:400]}"
            except Exception as error:  # noqa: BLE001 (what is looked for)
                return "failed", f"{type(error).__name__}: {error}"[:400]
            return "fine", ""
    return "no guess compiles", refusal


def worker(out: Path, folder: Path, cuda_h: str) -> None:
    """Kernels of one folder that `out` does not have yet; written down one by one."""
    for name in ("sympy", "torch", "torch.distributed.tensor", "torch._dynamo"):
        with contextlib.suppress(ImportError):  # what is there shall not meet stand-ins
            importlib.import_module(name)
    sys.meta_path.append(StandIn())
    sys.path.insert(0, str(folder.parent))
    done = json.loads(out.read_text()) if out.exists() else {}
    for name, jit in kernels(folder):
        if name in done:
            continue
        done[name] = ["the compiler ended or hung", ""]
        out.write_text(json.dumps(done))

        def late(*_: object) -> None:
            raise LateError

        signal.signal(signal.SIGALRM, late)
        signal.alarm(SECONDS)
        try:
            done[name] = list(tried(jit, cuda_h))
        except LateError:
            done[name] = ["took too long", ""]
        except Exception as error:  # noqa: BLE001 (no outcome may be lost)
            done[name] = ["failed", f"{type(error).__name__}: {error}"[:400]]
        signal.alarm(0)
        out.write_text(json.dumps(done))


def run_watched(command: list[str], out: Path) -> int:
    """The worker's exit status. It is ended where a compilation neither ends nor can be stopped."""
    worker = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    started = time.time()
    while worker.poll() is None:
        time.sleep(1)
        last = max(started, out.stat().st_mtime if out.exists() else 0)
        if time.time() - last > 2 * SECONDS:
            worker.kill()
    return worker.returncode


def main() -> None:
    """Every folder in a process of its own, begun again after the kernel that ended it."""
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parents[2])]
    from exported import cuda_include

    if sys.argv[1] == "--worker":
        worker(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
        return
    out = Path(sys.argv[1])
    for folder in sys.argv[2:]:
        command = [sys.executable, __file__, "--worker", str(out), folder, str(cuda_include())]
        while run_watched(command, out):
            pass
    found = json.loads(out.read_text())
    for outcome, count in collections.Counter(each for each, _ in found.values()).most_common():
        print(f"{count:5}  {outcome}")
    reasons = collections.Counter(why for each, why in found.values() if each == "failed")
    for reason, count in reasons.most_common():
        print(f"\n{count} failed: {reason}")


if __name__ == "__main__":
    main()
