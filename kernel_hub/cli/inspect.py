"""`kernel-hub inspect`: what images hold: those of a file, or a shipped cubin's."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..archs import tokens_of
from ..collection.manifest import CubinEntry, find_collection
from ..collection.resolve import names_target
from ..cubin import (
    CubinInfo,
    PtxInfo,
    PtxParam,
    driver_of,
    image_kind,
    read_cubin,
    read_fatbin,
    read_ptx,
)
from ..errors import (
    CubinCorruptError,
    CubinNotFoundError,
    FunctionNotFoundError,
    KernelHubError,
    listed,
    nearest,
)
from ..files import read_file
from ..formats import carray
from ..image.demangle import cxx_names, symbol_of
from .parts import console, inspect_text, sass
from .parts.gather import add_arch, add_package

NAME = "inspect"
HELP = "show what a file (cubin, fatbin, PTX, arrays in C), or a shipped cubin, holds"
EXAMPLE = "kernel-hub inspect rms_norm --arch sm90 --function rms_norm_bf16_vec1 --sass"
_SOURCES = (".c", ".cc", ".cpp", ".cxx", ".cu", ".h", ".hpp", ".cuh", ".inc", ".inl")
Described = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ShownImage:
    """One image to describe: its bytes, and the manifest's entry when it is shipped."""

    label: str
    data: bytes = dataclasses.field(repr=False)
    entry: CubinEntry | None = None


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", metavar="FILE|NAME", help="a file, or the name of a shipped cubin")
    add_package(parser, default="kernel_hub")
    add_arch(parser, "only images for these")
    parser.add_argument("--function", metavar="NAME", help="only this kernel")
    parser.add_argument(
        "--functions", action="store_true", help="every kernel, where a terminal gets a summary"
    )
    parser.add_argument("--sass", action="store_true", help="disassemble (needs nvdisasm)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def images(
    asked: str, *, package: str = "kernel_hub", archs: Sequence[str] | None = None
) -> list[ShownImage]:
    """The images `asked` stands for: those of a file, or a shipped cubin of each architecture."""
    if os.path.isfile(asked):
        if not asked.endswith(_SOURCES):
            return [ShownImage(asked, read_file(asked))]
        arrays = carray.load(asked)
        return [ShownImage(f"{asked}: {name}", data) for name, data in arrays.items()]
    collection = find_collection(package)
    name = asked.removesuffix(".cubin").removesuffix(".fatbin")
    if name not in collection.manifest.cubins:
        if os.path.isdir(asked):
            do = "kernel-hub inspect NAME --package DIR shows a folder of cubins"
            raise CubinNotFoundError(f"{asked} is a folder: name one of its files; {do}")
        shipped = listed(nearest(name, collection.manifest.cubins), 8)
        raise CubinNotFoundError(
            f"{asked} is neither a file nor a cubin that {package} ships; it ships: {shipped}"
        )
    entries = collection.manifest.cubins[name]
    chosen = [entry for _, entry in sorted(entries.items()) if _is_for(entry.target, archs)]
    if missing := _missing(archs, (entry.target for entry in entries.values())):
        raise CubinNotFoundError(
            f"{name} is shipped for {', '.join(sorted(entries))}, not {', '.join(missing)}"
        )
    return [ShownImage(entry.file, collection.read(entry), entry) for entry in chosen]


def _is_for(target: str, archs: Sequence[str] | None) -> bool:
    """Whether one of `archs` names the cubin's or the PTX's target; None names all."""
    target = target.replace("compute", "sm")
    return archs is None or any(names_target(arch, target) for arch in archs)


def _missing(archs: Sequence[str] | None, targets: Iterable[str]) -> list[str]:
    """Those of `archs` that name none of the targets."""
    there = list(targets)
    return [arch for arch in archs or () if not any(_is_for(target, [arch]) for target in there)]


def describe(image: ShownImage) -> Described:
    """Everything known of an image, as JSON would hold it. Raises CubinCorruptError."""
    try:
        kind = image_kind(image.data)
        reader = {"cubin": _cubin, "fatbin": _fatbin, "ptx": _ptx}[kind]
        return {"image": image.label, "kind": kind, "size_bytes": len(image.data), **reader(image)}
    except CubinCorruptError as error:
        raise CubinCorruptError(f"{image.label}: {error}") from error


def _cubin(image: ShownImage) -> Described:
    info = read_cubin(image.data)
    described = dataclasses.asdict(info)
    declared = image.entry.functions if image.entry else {}
    called = cxx_names(described["functions"])
    described["functions"] = {
        name: {
            "signature": _signature(info, name, declared),
            "cxx_name": called[name],
            **function,
            "launch": _launch(declared, name),
        }
        for name, function in described["functions"].items()
    }
    if image.entry:
        described["manifest"] = {
            "sha256": image.entry.sha256,
            "source": image.entry.source,
            "toolkit": image.entry.toolkit,
            "flags": list(image.entry.flags),
            "minimum_driver": image.entry.minimum_driver,
        }
    return described


def _launch(declared: Any, name: str) -> Described | None:
    """What the source states of launches, where a manifest has it."""
    launch = declared[name].launch if name in declared else None
    if launch is None:
        return None
    return {**launch._asdict(), "described": launch.describe()}


def _signature(info: CubinInfo, name: str, declared: Any) -> str:
    """With names and types where a manifest gives them, else sizes: all a cubin itself holds."""
    if name in declared:
        params = [f"{p.type} {p.name}" for p in declared[name].params]
    else:
        params = [f"<{p.size_bytes} bytes>" for p in info.functions[name].params]
    return f"{name}({', '.join(params)})"


def _fatbin(image: ShownImage) -> Described:
    entries = []
    for number, entry in enumerate(read_fatbin(image.data).entries):
        target = entry.target if entry.kind == "cubin" else entry.target.replace("sm", "compute")
        row: dict[str, Any] = {
            "kind": entry.kind,
            "target": target,
            "compressed": entry.compressed,
            "size_bytes": entry.size_bytes,
        }
        if entry.kind == "ptx":
            row["version"] = entry.version
        if entry.unread:
            row["unread"] = entry.unread
        if entry.image is not None:
            try:
                row["contents"] = describe(ShownImage(f"{image.label} entry {number}", entry.image))
            except CubinCorruptError as error:
                row["unread"] = str(error)
        entries.append(row)
    return {"entries": entries}


def _ptx(image: ShownImage) -> Described:
    info: PtxInfo = read_ptx(image.data)
    called = cxx_names(info.functions)
    functions = {
        name: {
            "signature": f"{name}({', '.join(_ptx_param(name, param) for param in params)})",
            "cxx_name": called[name],
            "params": [dataclasses.asdict(param) for param in params],
            "required_block": info.required_blocks.get(name),
        }
        for name, params in info.functions.items()
    }
    return {
        "version": info.version,
        "target": info.target,
        "minimum_driver": driver_of(info.version),
        "functions": functions,
    }


def _ptx_param(function: str, param: PtxParam) -> str:
    """As in PTX, but for the function in its name; a struct by value is an array of bytes there."""
    name = param.name.removeprefix(f"{function}_")
    element_bytes = int("".join(filter(str.isdigit, param.type)) or 8) // 8
    if param.size_bytes == element_bytes:
        return f"{param.type} {name}"
    count = param.size_bytes // element_bytes
    return f".align {param.align} {param.type} {name}[{count}]"


def only_function(described: Sequence[Described], name: str, where: str) -> list[Described]:
    """The images, and their entries, that have that kernel (its own or its C++ name), it alone."""
    parts = [entry.get("contents", {}) for one in described for entry in _entries(one)]
    every = {function for part in parts for function in part.get("functions", ())}
    if name not in every:
        symbol = symbol_of(name, every)
        if symbol is None:
            raise FunctionNotFoundError.among(name, cxx_names(every).values(), where)
        name = symbol

    def alone(one: Described) -> Described:
        return {**one, "functions": {name: one["functions"][name]}}

    return _kept(
        described,
        lambda entry: name in entry.get("contents", {}).get("functions", ()),
        lambda entry: {**entry, "contents": alone(entry["contents"])},
    )


def only_archs(described: Sequence[Described], archs: Sequence[str], where: str) -> list[Described]:
    """The images, and their entries, that are for one of `archs`."""
    targets = {entry["target"]: None for one in described for entry in _entries(one)}
    if missing := _missing(archs, targets):
        raise CubinNotFoundError(
            f"{where} has nothing for {', '.join(missing)}; it is for {', '.join(targets)}"
        )
    return _kept(described, lambda entry: _is_for(entry["target"], archs), lambda entry: entry)


def _entries(one: Described) -> list[Described]:
    """A fatbin's entries; another image as if it were the one entry."""
    return one["entries"] if "entries" in one else [{"target": one["target"], "contents": one}]


def _kept(
    described: Sequence[Described],
    is_wanted: Callable[[Described], bool],
    change: Callable[[Described], Described],
) -> list[Described]:
    found = []
    for one in described:
        entries = [change(entry) for entry in _entries(one) if is_wanted(entry)]
        if entries:
            found.append(
                {**one, "entries": entries} if "entries" in one else entries[0]["contents"]
            )
    return found


def run(args: argparse.Namespace) -> int:
    archs = None if args.arch is None else tokens_of(args.arch, "--arch")
    found = images(args.image, package=args.package, archs=archs)
    described = [describe(image) for image in found]
    if archs is not None:
        described = only_archs(described, archs, args.image)
    if args.function:
        described = only_function(described, args.function, args.image)
    if args.json:
        console.as_json(described)
        return 0
    data = {image.label: image.data for image in found}
    sums_up = console.is_terminal() and not args.functions
    for one in described:
        inspect_text.show(one, sums_up)
        if args.sass:
            if one["kind"] != "cubin":
                raise KernelHubError(f"--sass reads cubins; {one['image']} is {one['kind']}")
            symbol = next(iter(one["functions"])) if args.function else None
            console.note(sass.disassemble(data[one["image"]], symbol), wraps=False)
    return 0
