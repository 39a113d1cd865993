"""C++ source as an image: compiled for a GPU when one is asked for, kept on disk by content.

Also images whose functions go by other names than their symbols (cuda.core's ObjectCode).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import cache_folder
from ..archs import target_of, token_of
from ..compilers import nvrtc
from ..errors import CompileError, FunctionNotFoundError, KernelHubError, ParamsError
from ..files import read_file
from ..signature.c_types import type_info
from ..signature.params import Param
from .foreign import PTX_FLOATS
from .shipped import Chosen, ForeignImage, FunctionSpec, Image, open_image

_FORMAT = 2  # raise it when entries of the cache are written otherwise
_LENGTH = re.compile(r"(\d+)")
_MAX_SOURCE_BYTES = 1 << 28
# Options of NVRTC that from_source has no use for, and what to do instead.
_REFUSED = {
    r"--?(arch|gpu-architecture)\b": "the architecture is given as arch='sm90'",
    r"--?(time|create-pch|pch-dir|fdevice-time-trace)\b": "it writes files; leave it out",
    r"(-dlto|--dlink-time-opt|--?optix-ir|--?fdevice-syntax-only)\b": "it makes no machine code",
    r"(-dc|--?device-c|-rdc=true|--relocatable-device-code=true)\b": "from_source links nothing, "
    "and needs code that is whole",
}

Types = Mapping[str, Sequence[tuple[str | None, str | None]]]  # function -> (name, C type) each


class NamedImage:
    """`image` with its functions offered under the names of `symbols` (name -> symbol).

    types: parameter names and C types by offered name, where they are known.
    """

    def __init__(self, image: ForeignImage, symbols: Mapping[str, str], types: Types) -> None:
        self.label = image.label
        self._image = image
        self._specs: dict[str, FunctionSpec] = {}
        for name, symbol in symbols.items():
            spec = image.spec(symbol)
            if name in types and spec.params is not None:
                params = tuple(
                    Param.make(old.position, param, text, old.size_bytes, old.offset_bytes)
                    for old, (param, text) in zip(spec.params, types[name], strict=True)
                )
                spec = spec._replace(params=params)
            self._specs[name] = spec._replace(name=name, symbol=symbol)

    def names(self) -> Sequence[str]:
        return list(self._specs)

    def spec(self, name: str) -> FunctionSpec:
        if name not in self._specs:
            raise FunctionNotFoundError.among(name, self._specs, self.label)
        return self._specs[name]

    def choose(self, compute_capability: tuple[int, int]) -> Chosen:
        return self._image.choose(compute_capability)._replace(functions=self._specs)


class SourceImage:
    """C++ source. Compiled at once for `arch`; without one for the GPU at hand, and at the first
    launch on a GPU of another architecture for that.
    """

    def __init__(
        self,
        code: Any,
        names: Sequence[str] | None,
        options: Any,
        arch: Any,
        at_hand: Callable[[], tuple[int, int]],
        cache: bool,
    ) -> None:
        self._code, self._file = _read_code(code)
        self.label = str(self._file) if self._file else "the source"
        if not all(map(_is_text, names or ())):
            raise ParamsError(
                f"function_names={names!r}: a name has a NUL or a lone surrogate in it"
            )
        self._names = names
        self._options = _checked_options(options)
        self._arch = None if arch is None else token_of(arch).replace("sm", "sm_")
        self.compiles_for_any = arch is None
        self._cache = cache
        self._built: dict[str, NamedImage] = {}
        self.log = ""
        # The GPU at hand is asked last: what is wrong with the source is said without one.
        self._first = self._build(self._arch or _own_arch(at_hand()))

    def names(self) -> Sequence[str]:
        return self._first.names()

    def spec(self, name: str) -> FunctionSpec:
        return self._first.spec(name)

    def choose(self, compute_capability: tuple[int, int]) -> Chosen:
        arch = self._arch or _own_arch(compute_capability)
        # What a compiler made here may be newer than the reader: no child process is asked.
        return self._build(arch).choose(compute_capability)._replace(unknown=())

    def _build(self, arch: str) -> NamedImage:
        if arch not in self._built:
            options = [f"-arch={arch}", *self._options]
            if nvrtc.includes_files(self._code, self._options):
                options += nvrtc.cuda_headers()
            key = self._key(options) if self._cache else None
            label = f"{self.label} compiled for {arch}"
            found = _read_entry(key, label) if key else None
            if found is None:
                made, symbols, types, log = self._compile(options)
                found = NamedImage(ForeignImage(made, label), symbols, types), log
                if key:
                    cache_folder.store("source", key, _entry(made, symbols, types, log))
            self._built[arch], self.log = found
        return self._built[arch]

    def _key(self, options: list[str]) -> str | None:
        """The name of the entry in the cache; None where the outcome hangs on what nobody sees."""
        folders, included = nvrtc.looked_into(options)
        own = self._file.parent if self._file else Path.cwd()
        toolkits = [path for path in folders if os.path.isfile(path / "cuda_runtime_api.h")]
        others = [path for path in folders if path not in toolkits]
        state = nvrtc.include_state(self._code, included, [own, *others])
        if state is None or any("pch" in option for option in options):
            return None
        state += map(nvrtc.folder_state, toolkits)
        parts = (_FORMAT, nvrtc.identity(), self.label, self._code, len(state), *state)
        return cache_folder.key(*parts, *options, self._names is None, *(self._names or ()))

    def _compile(self, options: list[str]) -> tuple[bytes, dict[str, str], Types, str]:
        name = str(self._file).encode(errors="replace").decode() if self._file else "source.cu"
        made = nvrtc.compile_source(self._code, name, options, self._names or ())
        image = ForeignImage(made.image, self.label)
        symbols = made.symbols if self._names is not None else _plain_names(image.names() or ())
        if not symbols:
            raise CompileError(
                f"{self.label} has no kernel: name the instances of its templates, as in "
                "function_names=['scale<float>']"
            )
        types = {}
        for offered, symbol in symbols.items():
            types[offered] = _types(self._code, offered, symbol, made, self.label)
        return made.image, symbols, types, made.log


def object_code_image(value: Any) -> Image:
    """The image in a cuda.core ObjectCode."""
    kind = getattr(value, "code_type", None)
    if kind not in ("cubin", "fatbin", "ptx"):
        raise ParamsError(
            f"filename is an ObjectCode of {kind!r}: a Kernel runs 'cubin', 'fatbin' or 'ptx'; "
            "link it first (cuda.core.Linker)"
        )
    code = getattr(value, "code", None)
    if not isinstance(code, (str, bytes, bytearray, memoryview)):
        raise ParamsError(f"filename is an ObjectCode whose code is {code!r}, not a {kind}")
    if isinstance(code, str) and kind != "ptx":  # ObjectCode.from_cubin("path")
        code = Path(code)
    image = open_image(code.encode(errors="replace") if isinstance(code, str) else code, None)
    given = getattr(value, "symbol_mapping", None) or {}
    if not isinstance(given, Mapping):
        raise ParamsError(f"the ObjectCode's symbol_mapping is {given!r}: a dict, name -> symbol")
    symbols = {
        name: symbol.decode(errors="replace") if isinstance(symbol, bytes) else str(symbol)
        for name, symbol in given.items()
    }
    names = image.names()
    if not symbols or names is None or not isinstance(image, ForeignImage):
        return image
    others = {name: name for name in names if name not in symbols.values()}
    return NamedImage(image, {**symbols, **others}, {})


def _read_code(code: Any) -> tuple[str, Path | None]:
    file = None
    if isinstance(code, os.PathLike):
        file = Path(os.fsdecode(code)).absolute()
        try:
            code = read_file(file, _MAX_SOURCE_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CompileError(f"{file} is not UTF-8: {error}") from error
    if not isinstance(code, str) or not _is_text(code):
        found = "a str with a NUL or a lone surrogate in it"
        found = found if isinstance(code, str) else type(code).__name__
        raise ParamsError(f"code is {found}: pass CUDA C++ as a str, or a Path to a file of it")
    if file is None and "{" not in code and len(code.split()) == 1:
        raise ParamsError(
            f"code={code!r:.80} is no CUDA C++ but looks like a file's name: pass "
            f"Path({code!r:.80}) to have the file read"
        )
    return code, file


def _is_text(value: str) -> bool:
    """Whether it can be handed to C as UTF-8: no NUL, no lone surrogate."""
    return "\0" not in value and value == value.encode(errors="replace").decode()


def _checked_options(options: Any) -> list[str]:
    parts = options
    with contextlib.suppress(ValueError):  # a quotation that does not end
        parts = shlex.split(options) if isinstance(options, str) else options
    if (
        isinstance(parts, str)
        or not isinstance(parts, Sequence)
        or not all(isinstance(part, str) and "\0" not in part for part in parts)
    ):
        raise ParamsError(
            f"options={options!r}: a list of NVRTC's options such as ['-std=c++20', '-DN=4', "
            "'-Iinclude'], or a str of them as a shell takes it"
        )
    for part in parts:
        for pattern, reason in _REFUSED.items():
            if re.match(pattern, part):
                raise ParamsError(f"options holds {part!r}: {reason}")
    return list(parts)


def _own_arch(compute_capability: tuple[int, int]) -> str:
    # From 9.0 on, the instructions of this very architecture too (wgmma, TMA's multicast).
    major, minor = compute_capability
    return target_of(f"sm{major}{minor}", exact=True)


def _plain_names(symbols: Sequence[str]) -> dict[str, str]:
    """Offered name -> symbol: `ns::scale` for _ZN2ns5scaleEPfi where no other is called so."""
    plain = {symbol: _plain_name(symbol) for symbol in symbols}
    counts = Counter(plain.values())
    return {name if counts[name] == 1 else symbol: symbol for symbol, name in plain.items()}


def _plain_name(symbol: str) -> str:
    """The name in a mangled one; instances of templates are left as they are."""
    rest = symbol.removeprefix("_Z").removeprefix("N")
    parts = []
    while match := _LENGTH.match(rest):
        end = match.end() + int(match[1])
        parts.append(rest[match.end() : end])
        rest = rest[end:]
    nested = symbol.startswith("_ZN")
    if not parts or rest.startswith("I") or nested != rest.startswith("E"):
        return symbol
    return "::".join(parts)


def _types(
    code: str, offered: str, symbol: str, made: nvrtc.CompiledUnit, where: str
) -> list[tuple[str | None, str | None]]:
    """Parameter names and types as the source declares them and PTX and cubin confirm.

    Where the source is not read, PTX tells floats alone, and `signatures=` helps.
    """
    from ..compilers.declarations import match_params, read_instance
    from ..cubin import read_cubin, read_ptx

    in_cubin = read_cubin(made.image).functions[symbol].params
    in_ptx = read_ptx(made.ptx).functions.get(symbol, ()) if made.ptx else ()
    if len(in_ptx) != len(in_cubin):
        return [(None, None)] * len(in_cubin)
    found: list[tuple[str | None, str]] = [(None, "")] * len(in_ptx)
    with contextlib.suppress(KernelHubError):
        declared = read_instance(code, offered, where)
        found = [(e.name, e.type) for e in match_params(declared, in_cubin, in_ptx, where)]
    return [
        (name, text if type_info(text) else PTX_FLOATS.get(ptx.type, text or None))
        for (name, text), ptx in zip(found, in_ptx, strict=True)
    ]


def _entry(image: bytes, symbols: dict[str, str], types: Types, log: str) -> bytes:
    head = json.dumps({"symbols": symbols, "types": types, "log": log})
    return head.encode() + b"\n" + image


def _read_entry(key: str, label: str) -> tuple[NamedImage, str] | None:
    """What `_entry` wrote, checked like anything from disk; None where there is no such entry."""
    data = cache_folder.load("source", key)
    if data is None:
        return None
    head, _, image = data.partition(b"\n")
    try:
        raw = json.loads(head)
        if not _is_head(raw):
            raise ValueError("its head is not what from_source writes")
        return NamedImage(ForeignImage(image, label), raw["symbols"], raw["types"]), raw["log"]
    except (ValueError, RecursionError, KernelHubError) as error:
        cache_folder.discard("source", key, error)
        return None


def _is_head(raw: Any) -> bool:
    if not isinstance(raw, dict) or raw.keys() != {"symbols", "types", "log"}:
        return False
    symbols, types = raw["symbols"], raw["types"]
    return (
        isinstance(raw["log"], str)
        and isinstance(symbols, dict)
        and all(isinstance(symbol, str) for symbol in symbols.values())
        and isinstance(types, dict)
        and all(isinstance(params, list) for params in types.values())
        and all(
            isinstance(pair, list) and len(pair) == 2 and {*map(type, pair)} <= {str, type(None)}
            for params in types.values()
            for pair in params
        )
    )
