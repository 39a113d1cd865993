"""NVRTC through cuda-core (the extra `jit`): C++ text to a cubin, and what the result depends on.

Knows no Kernel and no cache.
"""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import cache_folder
from ..errors import CompileError, MissingPackageError

INSTALL = "pip install 'kernel_hub[jit]'"
_BUNDLED_SINCE = (13, 3)  # NVRTC carries CUDA's and CCCL's headers with it
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|include_next|import)[ \t]*(.*)$", re.MULTILINE)
_HAS_INCLUDE = re.compile(r"__has_include\w*\s*\(\s*([^)\n]*)")
_LOOKS = re.compile(r"-I|--include-path|--?pre-include|--?include")
_NAME = re.compile(r'<([^>\n]+)>|"([^"\n]+)"')


class CompiledUnit(NamedTuple):
    """One translation unit: `symbols` maps each asked expression to its name in the image."""

    image: bytes
    ptx: str | None
    symbols: dict[str, str]
    log: str


@functools.cache
def _bindings() -> tuple[Any, tuple[int, int], str]:
    """(cuda.bindings' nvrtc, its version, the library's path)."""
    try:
        from cuda import pathfinder
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise _missing(f"cuda-core is not installed ({error})") from error
    try:
        path = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path or "nvrtc"
        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise _missing(f"NVRTC cannot be loaded ({error})") from error
    return nvrtc, (major, minor), path


def _missing(found: str) -> MissingPackageError:
    return MissingPackageError(f"compiling source needs cuda-core and NVRTC: {found}; {INSTALL}")


def identity() -> str:
    """Which compiler this is: release, and the size of its library (patch releases differ)."""
    _, (major, minor), path = _bindings()
    size = os.stat(path).st_size if os.path.isabs(path) else 0
    return f"nvrtc {major}.{minor} {size}"


@functools.cache
def cuda_headers() -> tuple[str, ...]:
    """The option that finds CUDA's own headers: NVRTC's, or else those of an installed toolkit."""
    _, version, _ = _bindings()
    cache = cache_folder.private_folder("nvrtc_headers") if version >= _BUNDLED_SINCE else None
    if cache is not None:
        return (f"--use-bundled-headers={cache / '{}.{}'.format(*version)}",)
    from cuda import pathfinder

    found = pathfinder.find_nvidia_header_directory("cudart")
    return (f"-I{found}",) if found else ()


def compile_source(
    code: str, name: str, options: Sequence[str], names: Sequence[str]
) -> CompiledUnit:
    """Compile `code`, called `name` in messages; `options` is NVRTC's whole command line.

    Raises CompileError with the compiler's log.
    """
    nvrtc, version, _ = _bindings()
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise _missing(f"cuda-core is not installed ({error})") from error

    class Options(ProgramOptions):  # type: ignore[misc]
        # The fields of ProgramOptions cover only some of NVRTC's options; the list covers all.
        used = False

        def as_bytes(self, *_: Any, **__: Any) -> list[bytes]:
            self.used = True
            return [option.encode("utf-8", "surrogateescape") for option in options]

    log = io.StringIO()
    asked = Options(name=name, arch=_arch_of(options))
    try:
        program = Program(code, "c++", asked)
        made = program.compile("cubin", name_expressions=tuple(names), logs=log)
    except Exception as error:
        if type(error).__name__ != "NVRTCError":  # cuda-core does not publish the class
            raise
        said = _clean(str(error).rpartition("compilation log:")[2])
        wanted = f" with the functions {', '.join(names)}" if names else ""
        raise CompileError(
            f"{name} does not compile{wanted} (NVRTC {version[0]}.{version[1]}, options "
            f"{' '.join(options)}){_hint(nvrtc, said)}",
            log=said,
        ) from error
    if not asked.used:
        raise MissingPackageError(
            f"this release of cuda-core compiles without asking for its options; {INSTALL} brings "
            "one that does"
        )
    symbols = {
        key: value.decode() if isinstance(value, bytes) else str(value)
        for key, value in made.symbol_mapping.items()
    }
    return CompiledUnit(bytes(made.code), _ptx(nvrtc, program), symbols, _clean(log.getvalue()))


def _arch_of(options: Sequence[str]) -> str:
    return next(o.partition("=")[2] for o in options if o.startswith("-arch="))


def _ptx(nvrtc: Any, program: Any) -> str | None:
    """The PTX that the cubin was made of: it tells floats from integers."""
    try:
        code, size = nvrtc.nvrtcGetPTXSize(program.handle)
        text = bytearray(size)
        if int(code) == 0 and size > 1 and int(nvrtc.nvrtcGetPTX(program.handle, text)[0]) == 0:
            return text.rstrip(b"\0").decode()
    except (TypeError, ValueError, RuntimeError):  # another release of the bindings
        pass
    return None


def _clean(log: str) -> str:
    return log.replace("\0", "").strip()


def _hint(nvrtc: Any, log: str) -> str:
    if "--gpu-arch" in log:
        code, *_, numbers = nvrtc.nvrtcGetSupportedArchs()
        if int(code) == 0:
            return "; it compiles for " + ", ".join(f"sm{number}" for number in numbers)
    if 'open source file "cu' in log and not cuda_headers():
        package = f"nvidia-cuda-runtime{'-cu12' if _bindings()[1] < (13, 0) else ''}"
        return (
            "; CUDA's headers were not found: NVRTC 13.3 and later bring them, an older one needs "
            f"pip install {package}"
        )
    return ""


def includes_files(code: str, options: Sequence[str]) -> bool:
    """Whether `code` compiled with `options` reads any other file."""
    return bool(_INCLUDE.search(code) or looked_into(options)[1])


def looked_into(options: Sequence[str]) -> tuple[list[Path], list[str]]:
    """(folders searched for headers, headers included) by `options`."""
    folders: list[Path] = []
    headers: list[str] = []
    parts = iter(options)
    for option in parts:
        match = _LOOKS.match(option)
        if match is None:
            continue
        value = option[match.end() :].removeprefix("=") or next(parts, "")
        if match[0] in ("-I", "--include-path"):
            folders.append(Path(value).absolute())
        else:
            headers.append(value)
    return folders, headers


def include_state(code: str, included: Iterable[str], folders: Sequence[Path]) -> list[str] | None:
    """What the files that `code` may include hold, transitively, as parts of a cache key.

    included: names given by option; folders: where the compiler looks. Both sides of every #if
    count, and every folder's file of a name. None where one cannot be followed: a name that is a
    macro, a file that cannot be read.
    """
    state: list[str] = []
    seen: set[Path] = set()
    waiting: list[tuple[str, list[Path]]] = [(code, [])]
    waiting += [(f'#include "{name}"', []) for name in included]
    while waiting:
        text, own = waiting.pop()
        for name in _included_names(text):
            if name is None:
                return None
            for path in dict.fromkeys(Path(os.path.normpath(p / name)) for p in [*own, *folders]):
                if path in seen or not os.path.isfile(path):
                    continue
                seen.add(path)
                try:
                    content = path.read_bytes()
                except OSError:
                    return None
                state += [str(path), cache_folder.key(content)]
                waiting.append((content.decode("utf-8", "replace"), [path.parent]))
    return sorted(state)


def _included_names(text: str) -> Iterator[str | None]:
    for pattern in (_INCLUDE, _HAS_INCLUDE):
        for found in pattern.findall(text):
            name = _NAME.match(found)
            yield (name[1] or name[2]) if name else None


def folder_state(folder: Path) -> str:
    """What tells one toolkit's headers from another's: the names, sizes and times at the top."""
    with os.scandir(folder) as entries:
        facts = sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in entries)
    return cache_folder.key(folder, *facts)
