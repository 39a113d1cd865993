"""The generated launcher of a Triton kernel: what it assumed is checked, hidden pointers added.

One small function a kernel, which hands over to the kernel's own launcher. The C launcher does the
same in front of it where there is one (see TritonFunction). Nothing here leads back to the
TritonFunction, so that it dies with its last user.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...arrays.interop import describe
from ...errors import LaunchConfigError, ParamsError, TensorError
from ...launch.function import KernelFunction
from ...launch.geometry import dims
from ...signature.c_types import type_info
from ...signature.params import Param, ordered, wrong_count
from . import scratch
from .descriptor import Encoded, Expander, not_divisible
from .metadata import Metadata
from .signature import Argument, c_type
from .tuples import Tuples

_PORTABLE_CLUSTER = 8


def generate(
    function: KernelFunction, metadata: Metadata, arguments: tuple[Argument, ...]
) -> dict[str, Any]:
    """The generated functions by name, and the names they use.

    launch(gridDim, blockDim, sharedMemBytes, stream, params, **options); at(gridDim) gives
    run(*params, stream), which calls `call`, as nowhere() does for an empty grid; expanded(params)
    gives the kernel's parameters but the hidden ones; `expected` are the declared arguments. While
    `armed` is false, a launch ends with arm(), the owner's chance to put the C launcher in `call`.
    """
    namespace = _namespace(function, metadata, arguments)
    plain = not (namespace["FIXED"] or metadata.global_scratch_bytes)
    namespace["armed"] = not plain or any(argument.is_descriptor for argument in arguments)
    text = _source(arguments, metadata, fixed=bool(namespace["FIXED"]))
    exec(compile(text, f"<launcher of {function.name}>", "exec"), namespace)
    namespace["call"] = namespace["launch"]
    return namespace


def _namespace(
    function: KernelFunction, metadata: Metadata, arguments: tuple[Argument, ...]
) -> dict[str, Any]:
    fixed = _fixed_options(metadata, function)
    expected: list[Param] = []
    names: dict[str, Any] = {}
    maps = iter(metadata.maps)
    tuples = Tuples([argument.name for argument in arguments])
    position = 0
    for i, argument in enumerate(arguments):
        if argument.is_descriptor:
            meta = next(maps) if argument.parts[0] == "nvTmaDesc" else None
            names[f"expand{i}"] = Expander(argument, i, meta, metadata.label).expand
        expected.append(_shown(i, argument, (function.spec.params or ())[position]))
        position += len(argument.divisors)
    return names | {
        "__builtins__": __builtins__,
        "BLOCK": (metadata.block_threads, 1, 1),
        "SHARED": metadata.shared_bytes,
        "FIXED": fixed,
        "inner": function,
        "expected": tuple(expected),
        "ordered": partial(_ordered, tuples, expected),
        "flat": tuples.flat,
        "wrong_count": wrong_count,
        "settle": partial(settle, metadata, fixed),
        "by_name": partial(by_name, tuples, expected),
        "check_each": partial(_check_each, arguments, expected, metadata.label),
        "with_scratch": partial(scratch.launch, function, metadata),
        "one_device": partial(_one_device, function, metadata.label),
    }


def _fixed_options(metadata: Metadata, function: KernelFunction) -> dict[str, Any]:
    """The launch attributes that the kernel needs."""
    options: dict[str, Any] = {}
    # A cluster that is compiled in needs no attribute, unless its size has to be allowed.
    if metadata.cluster and (
        function.spec.cluster is None or metadata.num_ctas > _PORTABLE_CLUSTER
    ):
        options["cluster"] = metadata.cluster
    if metadata.cooperative:
        options["cooperative"] = True
    if metadata.programmatic:
        options["programmatic"] = True
    return options


def _shown(index: int, argument: Argument, param: Param) -> Param:
    """A declared argument as messages and `params` show it; `param` is its first of the cubin's."""
    if argument.is_descriptor:
        return Param(index, argument.name, argument.type, param.size_bytes, 0)
    kind = c_type(argument.type) if argument.type is not None else None
    if kind is None or type_info(kind) is None:
        return Param(index, argument.name, None, param.size_bytes, 0)
    return Param.make(index, argument.name, kind, param.size_bytes, 0)


# -- the text


def _source(arguments: tuple[Argument, ...], metadata: Metadata, *, fixed: bool) -> str:
    names = [f"a{i}" for i in range(len(arguments))]
    tuples = ["params = flat(params)"] if any("." in a.name for a in arguments) else []
    unpack = ["if params:", "    raise wrong_count(params, expected)"]
    if names:
        unpack = [
            *tuples,
            "try:",
            f"    {', '.join(names)}, = params",
            "except ValueError:",
            "    raise wrong_count(params, expected) from None",
        ]
    checks, values = _checks(arguments, names), _values(arguments, names)
    call = f"inner(gridDim, BLOCK, SHARED, stream, ({values}{'None, ' * metadata.num_hidden})"
    with_options, without = f"{call}, **options)", f"{call})"
    if metadata.global_scratch_bytes:
        with_options = without = f"with_scratch(gridDim, stream, ({values}), options)"
    launch = [
        "if type(params) is not tuple and type(params) is not list:",
        "    params = ordered(params)",
        *unpack,
        "if blockDim is not None or sharedMemBytes is not None or options:",
        "    options = settle(blockDim, sharedMemBytes, options)",
        *(["else:", "    options = FIXED"] if fixed else []),
        *checks,
        *([with_options] if fixed else ["if options:", f"    {with_options}", "else:"]),
        *([] if fixed else [f"    {without}"]),
    ]
    launch += ["if not armed:", "    arm()"]
    by_name = ["if named:", "    params = by_name(params, named)"]
    run = "    def run(*params, stream=None, **named):"
    lines = [
        "def launch(gridDim, blockDim=None, sharedMemBytes=None, stream=None, params=(), "
        "**options):",
        *_indent(launch),
        "def at(gridDim):",
        run,
        *_indent(_indent([*by_name, "call(gridDim, None, None, stream, params)"])),
        "    return run",
        "def nowhere():",
        run,
        *_indent(_indent([*by_name, "expanded(params)"])),
        "    return run",
        "def expanded(params):",
        *_indent([*unpack, *checks, f"return ({values})"]),
    ]
    return "\n".join(lines) + "\n"


def _indent(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _values(arguments: tuple[Argument, ...], names: list[str]) -> str:
    """The items of the tuple that the kernel takes, without the hidden pointers."""
    return "".join(
        f"*d{name[1:]}, " if argument.is_descriptor else f"{name}, "
        for argument, name in zip(arguments, names, strict=True)
    )


def _checks(arguments: tuple[Argument, ...], names: list[str]) -> list[str]:
    """Divisibility all at once; what fails or is of another kind is looked at one by one."""
    by_divisor: dict[int, list[str]] = {}
    lines = []
    for argument, name in zip(arguments, names, strict=True):
        if argument.is_descriptor:
            lines.append(f"d{name[1:]} = expand{name[1:]}({name})")
        elif argument.divisors[0] > 1:
            pointer = (argument.type or "").startswith("*")
            term = f"{name}.data_ptr()" if pointer else name
            by_divisor.setdefault(argument.divisors[0], []).append(term)
    if lines:
        lines.append(f"one_device(({_values(arguments, names)}))")
    terms = []
    for divisor, values in by_divisor.items():
        if divisor & (divisor - 1):
            terms += [f"{value} % {divisor}" for value in values]
        else:
            terms.append(f"({' | '.join(values)}) & {divisor - 1}")
    if terms:
        lines += [
            "try:",
            f"    wrong = {' or '.join(terms)}",
            "except (AttributeError, TypeError, RuntimeError):",
            "    wrong = True",
            "if wrong:",
            f"    check_each(({''.join(name + ', ' for name in names)}))",
        ]
    return lines


# -- what it calls for the rarer cases


def settle(
    metadata: Metadata,
    fixed: Mapping[str, Any],
    blockDim: Any,
    sharedMemBytes: Any,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """The options of a launch, the kernel's own included.

    LaunchConfigError where block, shared memory or options are not the kernel's.
    """
    name = metadata.name
    block = (metadata.block_threads, 1, 1)
    if blockDim is not None and dims(blockDim, "blockDim", name) != block:
        raise LaunchConfigError(
            f"blockDim={blockDim!r} of {name}: its num_warps {metadata.num_warps} means {block} "
            f"({metadata.label}); leave it out"
        )
    if sharedMemBytes is not None:
        try:
            given: Any = operator.index(sharedMemBytes)
        except TypeError:
            given = None
        if given != metadata.shared_bytes:
            raise LaunchConfigError(
                f"sharedMemBytes={sharedMemBytes!r} of {name}: it takes {metadata.shared_bytes} "
                f"(shared in {metadata.label}); leave it out"
            )
    rest = dict(options)
    own: Any
    for option, own in (
        ("cluster", metadata.cluster or (1, 1, 1)),
        ("cooperative", metadata.cooperative),
        ("programmatic", metadata.programmatic),
    ):
        given = rest.pop(option, None)
        if given is None or given is False:
            continue
        if (dims(given, "cluster", name) if option == "cluster" else bool(given)) != own:
            raise LaunchConfigError(
                f"{option}={given!r} of {name}: it is compiled for {own!r} ({metadata.label})"
            )
    return {**rest, **fixed}


def blocks(grid: Any, metadata: Metadata) -> tuple[int, int, int] | None:
    """Blocks of a grid of programs; None for an empty grid. LaunchConfigError."""
    where = f"{metadata.name} (programs)"
    if callable(grid):
        raise LaunchConfigError(
            f"grid of {where} is a function: its constexprs are compiled in, give the numbers"
        )
    x, y, z = dims(grid, "grid", where)
    if min(x, y, z) < 0:
        raise LaunchConfigError(f"grid={grid!r} of {where}: 0 or more")
    if 0 in (x, y, z):
        return None
    of_x, of_y, of_z = metadata.program_blocks
    return x * of_x, y * of_y, z * of_z


def _ordered(tuples: Tuples, expected: Sequence[Param], params: Any) -> Sequence[Any]:
    """A dict's values in the order of the arguments, anything else as a sequence."""
    named = isinstance(params, Mapping) and tuples.any
    return ordered(tuples.by_name(params) if named else params, expected)


def by_name(
    tuples: Tuples, expected: Sequence[Param], given: Sequence[Any], named: Mapping[str, Any]
) -> Sequence[Any]:
    """Positional and named arguments of `f[grid](…)` in order."""
    if tuples.any:
        given, named = tuples.flat(given), tuples.by_name(named)
    first = [param.name for param in expected[: len(given)]]
    if twice := [name for name in first if name in named]:
        raise ParamsError(f"{', '.join(twice)} given by position and by name")
    if len(given) > len(expected):
        raise wrong_count([*given, *named], expected)
    return ordered({**dict(zip(first, given, strict=True)), **named}, expected)


def _check_each(
    arguments: Sequence[Argument], expected: Sequence[Param], where: str, values: Sequence[Any]
) -> None:
    """Each value's divisibility, whatever kind it is of. Raises ParamsError."""
    for argument, param, value in zip(arguments, expected, values, strict=True):
        divisor = argument.divisors[0]
        if argument.is_descriptor or divisor == 1:
            continue
        found = value_of(value)
        if found is not None and found % divisor:
            text = not_divisible(
                where, param.position, argument.name, found, divisor, address=param.is_pointer
            )
            raise ParamsError(text)


def integer(value: Any, what: str) -> int:
    """The whole number that an argument is. Raises ParamsError, which begins with `what`."""
    try:
        return operator.index(getattr(value, "value", value))
    except TypeError:
        found = f"{what} is {value!r:.80}"
        raise ParamsError(f"{found}: a whole number, as the grid names it") from None


def value_of(value: Any) -> int | None:
    """An array's address or an integer's value; None for what the kernel itself will refuse."""
    try:
        # First: an array of one integer is taken for that integer by `operator.index`.
        view = describe(value)
        return view.address if view is not None else operator.index(getattr(value, "value", value))
    except (KeyError, IndexError, TypeError, ValueError):  # TensorError is a ValueError
        return None


def _one_device(function: KernelFunction, where: str, values: tuple[Any, ...]) -> None:
    """The tensors behind descriptors are on the launch's device."""
    device = function._device_of(values)
    for value in values:
        if isinstance(value, Encoded) and value.get_device() != device:
            raise TensorError(
                f"{where}: a descriptor's tensor is on device {value.get_device()}, the launch on "
                f"device {device}"
            )
