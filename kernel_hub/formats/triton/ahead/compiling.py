"""Triton kernels built ahead of time, for any architecture and without a GPU, into a collection.

Knows what a manifest holds; Triton itself is behind `frontend`. Launches nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ....archs import ARCHS, tokens_of
from ....collection.manifest import CubinEntry, FunctionEntry, ParamEntry
from ....collection.manifest_write import function_entry
from ....cubin import read_cubin
from ....cubin.model import CubinInfo
from ....errors import CompileError, KernelHubError, ParamsError, listed, nearest
from ....image.foreign import driver_floor
from ..configuration import Configuration, configuration
from ..grid import Grid, check_names
from ..metadata import MAX_WARPS, Metadata
from ..signature import c_types, with_signature
from ..ttir import read_ttir
from .collection import add
from .frontend import compiled, jit_function, triton

# Shared memory that a block may be granted, KiB, by compute capability: no GPU is there to ask.
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
_NOT_OPTIONS = {"arch", "backend_name", "warp_size"}  # what the target says
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


@dataclass(frozen=True)
class Built:
    """One configuration for one architecture.

    name: under which a collection offers it. entry, image: what goes there, None where it cannot
    run on that architecture; problem: why not, else ''.
    """

    name: str
    arch: str
    configuration: Configuration
    entry: CubinEntry | None = field(repr=False)
    image: bytes | None = field(repr=False)
    problem: str = ""


def compile(
    fn: Any,
    signature: str | Mapping[str, str],
    *,
    constexprs: Mapping[str, Any] | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    arch: str | Sequence[str] = ARCHS,
    out: str | Path,
    name: str | None = None,
    grid: str | None = None,
    **options: Any,
) -> str:
    """Build a `@triton.jit` function into the collection `out`; no GPU is needed.

    signature: types in Triton's spelling, '*fp16:16,*fp16:16,i32' by position (constexprs may be
        left out) or a dict name -> type. ':16' promises an address or a value that 16 divides,
        and launches check it; ':1' is a constant 1.
    constexprs: values of the constants, by name; those with a default may be left out.
    arch: 'sm80,sm90', or a list of such tokens; 'sm_90' is read as sm90.
    out: the collection's folder: made where it does not exist, added to where it does.
    name: what the collection calls it; None makes a name of the configuration. A name stands for
        one configuration: another one under the same name takes its place.
    grid: the programs of a launch, kept with it: C expressions over integer arguments and
        constants, '(n + BLOCK - 1) / BLOCK, heads'; then `run` and exported C need none.
    options: others of Triton's compiler: num_ctas, maxnreg, launch_pdl, …; enable_fp_fusion is
        True unless given, whatever the version and the environment say.

    Returns the name: `collection(out)[name]` is the function. Nothing is written unless it compiles
    for every architecture. Raises ParamsError, CompileError (with Triton's text),
    MissingPackageError, CubinCorruptError (a damaged collection in `out`).
    """
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ParamsError(f"name={name!r:.80}: up to 200 letters, digits, '_', '.' and '-'")
    folder, tokens, constants = _folder(out), archs(arch), _constants(constexprs)
    options = {"num_warps": num_warps, "num_stages": num_stages, **options}
    jit = jit_function(fn)
    of = _configuration(jit, signature, constants, options)
    kept = _grid(jit, of, grid)
    built = [_build(jit, of, name, token, kept) for token in tokens]
    for one in built:
        if one.problem:
            raise CompileError(f"{one.problem}; or leave {one.arch} out of arch")
    add(folder, built)
    return built[0].name


def compile_configs(
    fn: Any,
    configs: Sequence[Any] | None = None,
    *,
    signature: str | Mapping[str, str],
    constexprs: Mapping[str, Any] | None = None,
    arch: str | Sequence[str] = ARCHS,
    out: str | Path,
    grid: str | None = None,
    on_step: Callable[[str], None] | None = None,
) -> list[Built]:
    """Build several configurations of one kernel; arguments not named here are as in `compile`.

    configs: a dict each, {'BLOCK_M': 64, 'num_warps': 8}, the kernel's arguments and the compiler's
        options together, or `triton.Config` objects; None takes those of its `@triton.autotune`.
    on_step: called with a text before each compilation.

    A configuration that needs more shared memory than an architecture has is left out there, and
    its `Built` says so; any other problem is an error, and then nothing is written.
    """
    folder, tokens, constants = _folder(out), archs(arch), _constants(constexprs)
    jit = jit_function(fn)
    if configs is None:
        configs = getattr(fn, "configs", None)
        if not configs:
            raise ParamsError(f"{jit.__name__} has no @triton.autotune: pass configs=[…]")
    if not isinstance(configs, (list, tuple)) or not configs:
        raise ParamsError(f"configs={configs!r:.80}: expected a list of at least one")
    todo = []
    for config in configs:
        values, options = _split_config(jit, config)
        if twice := sorted(values.keys() & constants.keys()):
            raise ParamsError(
                f"{jit.__name__}: {twice[0]!r} is {values[twice[0]]!r} in one of configs and "
                f"{constants[twice[0]]!r} in constexprs: leave one out"
            )
        todo.append(_configuration(jit, signature, {**constants, **values}, options))
    kept = [_grid(jit, of, grid) for of in todo]
    built = []
    for of, grid in zip(todo, kept, strict=True):
        for token in tokens:
            if on_step is not None:
                on_step(f"{token} {of.name(jit.__name__)}")
            built.append(_build(jit, of, None, token, grid))
    add(folder, built)
    return built


def archs(arch: str | Sequence[str]) -> list[str]:
    """The tokens of `arch`, checked: 'sm80,sm90' or a list."""
    tokens = tokens_of(arch)
    for token in tokens:
        if not token[2:].isdigit():
            raise ParamsError(f"arch takes tokens such as sm80 or sm90, not {token!r}")
        if int(token[2:]) < 75:
            raise ParamsError(f"arch {token}: nothing is built here for GPUs before sm75")
    return tokens


def _folder(out: Any) -> Path:
    """`out` as a path that may be a folder, known before anything is compiled."""
    if not isinstance(out, (str, Path)) or not str(out) or "\0" in str(out):
        raise ParamsError(f"out={out!r:.80}: expected the path of a folder")
    if os.path.isfile(out):
        raise KernelHubError(f"cannot write the collection {str(out)!r}: it is a file")
    return Path(out)


def _constants(constexprs: Any) -> dict[str, Any]:
    if constexprs is not None and not isinstance(constexprs, Mapping):
        raise ParamsError(f"constexprs={constexprs!r:.80}: expected a dict name -> value")
    return dict(constexprs or {})


def _split_config(jit: Any, config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the kernel's arguments, the compiler's options) of one of `configs`."""
    if isinstance(config, triton().Config):
        config = {
            **config.kwargs,
            **{
                key: value
                for key in ("num_warps", "num_stages", "num_ctas", "maxnreg")
                if (value := getattr(config, key, None)) is not None
            },
        }
    if not isinstance(config, Mapping):
        raise ParamsError(f"configs holds {config!r:.80}: a dict or a triton.Config is one")
    values = {name: value for name, value in config.items() if name in jit.arg_names}
    options = {name: value for name, value in config.items() if name not in values}
    return values, {"num_warps": 4, "num_stages": 3, **options}


def _configuration(
    jit: Any, signature: Any, constexprs: Mapping[str, Any], options: Mapping[str, Any]
) -> Configuration:
    from triton.backends.nvidia.compiler import CUDAOptions

    known = CUDAOptions.__dataclass_fields__.keys() - _NOT_OPTIONS
    constant = frozenset(p.name for p in jit.params if p.is_constexpr)
    for option in options.keys() & constant & known:
        # A kernel may ask for the compiler's own figure by its name: both are one value.
        value = constexprs.get(option, options[option])
        constexprs, options = {**constexprs, option: value}, {**options, option: value}
    for option in options:
        if option in jit.arg_names and option not in known & constant:
            raise ParamsError(f"{option!r} is an argument of the kernel: give it in constexprs")
        if option not in known:
            raise ParamsError(
                f"{option!r} is neither an argument of {jit.__name__} ({', '.join(jit.arg_names)}) "
                f"nor an option of Triton's compiler: {listed(nearest(option, known), 5)}"
            )
    for option, most in (("num_warps", MAX_WARPS), ("num_stages", 1 << 10)):
        if type(options[option]) is not int or not 1 <= options[option] <= most:
            raise ParamsError(f"{option}={options[option]!r}: a whole number from 1 to {most}")
    if "enable_fp_fusion" in known:
        # Said here, as Triton's own default changes with its version and the environment.
        options = {"enable_fp_fusion": True, **options}
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(jit.fn).parameters.items()
        if parameter.default is not parameter.empty
    }
    return configuration(
        jit.__name__, jit.arg_names, defaults, constant, signature, constexprs, options
    )


def _grid(jit: Any, of: Configuration, grid: Any) -> str | None:
    """The text of a grid, checked against the configuration."""
    if grid is None:
        return None
    made = Grid(grid)
    check_names(made, of.signature, of.constexprs, jit.__name__)
    return made.text


def _build(jit: Any, of: Configuration, name: str | None, arch: str, grid: str | None) -> Built:
    name = of.name(jit.__name__) if name is None else name
    label = f"{jit.__name__} for {arch}"
    if of.options.get("num_ctas", 1) != 1 and int(arch[2:]) < 90:
        # NOTE: Triton before 3.6 does not say so: LLVM ends the process.
        raise ParamsError(
            f"{label}: num_ctas={of.options['num_ctas']}: clusters need sm90 or later"
        )
    found, image, ttir = compiled(jit, of, int(arch[2:]), label)
    metadata = Metadata.from_mapping(found, f"Triton's metadata of {label}")
    limit = _SHARED_KIB.get(int(arch[2:]), 227) << 10
    if metadata.shared_bytes > limit:
        problem = (
            f"{name} needs {metadata.shared_bytes} bytes of shared memory a block and {arch} has "
            f"{limit}: fewer stages or smaller blocks"
        )
        return Built(name, arch, of, None, None, problem)
    info = read_cubin(image)
    arguments = with_signature(read_ttir(ttir, metadata.name, label), of.signature, metadata)
    launch: dict[str, Any] = {
        "metadata": found,
        "arguments": [asdict(argument) for argument in arguments],
        "configuration": of.as_json(),
        "names": list(jit.arg_names),
    }
    if grid is not None:
        launch["grid"] = grid
    function = _function(info, metadata.name, c_types(arguments, metadata), launch, label)
    entry = CubinEntry(
        name=name,
        arch=info.arch,
        file=f"{info.arch}/{name}.cubin",
        sha256=hashlib.sha256(image).hexdigest(),
        size_bytes=len(image),
        source=f"{Path(jit.fn.__code__.co_filename).name}:{jit.__name__}",
        source_sha256=hashlib.sha256(str(jit.cache_key).encode()).hexdigest(),
        toolkit=f"Triton {triton().__version__}",
        target=info.target,
        flags=tuple(f"{option}={value}" for option, value in of.options.items()),
        os_abi=info.os_abi,
        abi_version=info.abi_version,
        minimum_driver=driver_floor(info.toolkit),
        functions={function.name: function},
    )
    return Built(name, info.arch, of, entry, image)


def _function(
    info: CubinInfo,
    name: str,
    types: Sequence[tuple[str, str]],
    launch: dict[str, Any],
    label: str,
) -> FunctionEntry:
    """The manifest's entry: the cubin's own figures, types and names from Triton's form."""
    f = info.functions.get(name)
    if f is None or len(f.params) != len(types):
        raise CompileError(
            f"{label}: the cubin has {'no such function' if f is None else len(f.params)} "
            f"where {name}({', '.join(name for _, name in types)}) was to be: this version of "
            "Triton is not known here"
        )
    params = tuple(
        ParamEntry(name, kind, param.size_bytes, param.offset_bytes)
        for (kind, name), param in zip(types, f.params, strict=True)
    )
    return function_entry(f, params, launch)
