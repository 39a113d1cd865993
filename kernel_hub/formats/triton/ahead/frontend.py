"""Triton's own side of a build: finding the function, compiling it, as its versions want it.

Knows Triton's interface (3.0 and later; imported when used), and nothing of collections.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ....errors import CompileError, MissingPackageError, ParamsError
from ..configuration import Configuration, is_tuple, leaves, number, split

# Fields of Triton's metadata that say how to launch or what was compiled; others name files of
# the machine that compiled.
_KEPT = (
    *("name", "target", "num_warps", "num_ctas", "cluster_dims", "num_stages", "shared", "hash"),
    *("global_scratch_size", "global_scratch_align", "profile_scratch_size", "triton_version"),
    *("profile_scratch_align", "launch_pdl", "launch_cooperative_grid", "tensordesc_meta"),
)
# Line numbers would put this machine's folders into the cubin.
_NO_LINES = "TRITON_DISABLE_LINE_INFO"


def triton() -> ModuleType:
    """Triton itself, or MissingPackageError naming the extra."""
    try:
        return importlib.import_module("triton")
    except ImportError as error:
        raise MissingPackageError(
            f'building Triton kernels needs Triton ({error}): pip install "kernel_hub[triton]"'
        ) from error


def jit_function(fn: Any) -> Any:
    """The JITFunction under decorators such as @triton.autotune."""
    kind = triton().JITFunction
    found = fn
    while not isinstance(found, kind) and hasattr(found, "fn"):
        if type(found).__name__ == "InterpretedFunction":
            raise ParamsError("TRITON_INTERPRET is set: an interpreted function has no binary")
        found = found.fn
    if not isinstance(found, kind):
        raise ParamsError(f"{fn!r:.80} is no @triton.jit function")
    return found


def compiled(
    jit: Any, of: Configuration, capability: int, label: str
) -> tuple[dict[str, Any], bytes, str]:
    """(metadata, cubin, Triton's intermediate form), or CompileError with Triton's own text."""
    from triton.backends.compiler import GPUTarget

    try:
        with _without_lines():
            done = triton().compile(
                _source(jit, of),
                target=GPUTarget("cuda", capability, 32),
                options=dict(of.options),
            )
            metadata = json.loads(json.dumps(done.metadata._asdict(), default=vars))
            image, ttir = done.asm["cubin"], done.asm["ttir"]
    except Exception as error:  # whatever a compiler and the kernel's own Python may raise
        name = of.name(jit.__name__)
        raise CompileError(f"{label} ({name}) does not compile:", log=_text(error)) from error
    return {key: metadata[key] for key in _KEPT if key in metadata}, bytes(image), str(ttir)


def _text(error: BaseException | None) -> str:
    """An exception's own words and its causes': Triton keeps the reason of many in there."""
    lines = []
    while error is not None:
        lines.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return "\n".join(lines)


@contextlib.contextmanager
def _without_lines() -> Iterator[None]:
    """Unless the caller's environment says something about line numbers."""
    if _NO_LINES in os.environ:
        yield
        return
    os.environ[_NO_LINES] = "1"
    try:
        yield
    finally:
        del os.environ[_NO_LINES]


def _source(jit: Any, of: Configuration) -> Any:
    """Triton's description of what to compile, as its version wants it."""
    from triton.compiler import ASTSource

    takes = inspect.signature(ASTSource.__init__).parameters
    position = {name: i for i, name in enumerate(jit.arg_names)}
    if "constexprs" in takes:  # 3.3 and later
        constants: dict[Any, Any] = dict(of.constexprs)
        attrs = {}
        for name, text in of.signature.items():
            for path, _, kind, value in leaves(name, text):
                if not kind:
                    constants[(position[name], *path)] = value
                elif kind.endswith(":16"):
                    attrs[(position[name], *path)] = [["tt.divisibility", 16]]
        signature: dict[str, Any] = dict.fromkeys(jit.arg_names, "constexpr")
        signature |= {name: _nested(text) for name, text in of.signature.items()}
        return ASTSource(fn=jit, signature=signature, constexprs=constants, attrs=attrs)
    if tuples := [name for name, text in of.signature.items() if is_tuple(text)]:
        raise ParamsError(
            f"{tuples[0]} is a tuple, which Triton {triton().__version__} cannot compile: 3.3 can"
        )
    types = {name: text.partition(":")[0] for name, text in of.signature.items()}
    divisible = [position[name] for name, text in of.signature.items() if text.endswith(":16")]
    try:  # 3.2
        from triton.backends.compiler import AttrsDescriptor

        attrs = AttrsDescriptor.from_hints(dict.fromkeys(divisible, 16))
        return ASTSource(fn=jit, signature=types, constants=dict(of.constexprs), attrs=attrs)
    except ImportError:
        from triton.compiler.compiler import AttrsDescriptor

    return ASTSource(
        fn=jit,
        signature={position[name]: kind for name, kind in types.items()},
        constants={position[name]: value for name, value in of.constexprs.items()},
        attrs=AttrsDescriptor(divisible_by_16=tuple(divisible), equal_to_1=()),
    )


def _nested(text: str) -> Any:
    """A type as Triton takes it, without its hint; a tuple for a tuple."""
    if is_tuple(text):
        return tuple(_nested(part) for part in split(text[1:-1].removesuffix(",")))
    ((_, _, kind, _),) = leaves("", text)
    return kind.partition(":")[0] or "constexpr"


def from_file(path: Path, name: str) -> Any:
    """The object `name` of a Python file, which is executed as its own folder's module."""
    if not path.is_file():
        raise ParamsError(f"no file {str(path)!r}")
    triton()  # said better than by the file's own import
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ParamsError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file does
        raise CompileError(f"{path} cannot be executed:", log=_text(error)) from error
    finally:
        sys.path.pop(0)
    return _named(module, name, str(path))


def from_module(dotted: str, name: str) -> Any:
    """The object `name` of an installed module, which is imported."""
    triton()
    try:
        module = importlib.import_module(dotted)
    except (Exception, SystemExit) as error:  # whatever the module does
        raise CompileError(f"{dotted} cannot be imported:", log=_text(error)) from error
    return _named(module, name, dotted)


def _named(module: ModuleType, name: str, where: str) -> Any:
    if not hasattr(module, name):
        kernels = [key for key, value in vars(module).items() if hasattr(value, "arg_names")]
        raise ParamsError(f"{where} has no {name!r}; it has: {', '.join(kernels) or 'no kernel'}")
    return getattr(module, name)


def constant(text: str) -> Any:
    """A constant as written on a command line: a number, true, false, none, tl.float16, or text."""
    value = number(text)
    if value is not None:
        return value
    if text.startswith("tl."):
        found = getattr(triton().language, text[3:], None)
        if found is None:
            raise ParamsError(f"{text} is nothing in triton.language")
        return found
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)
