"""`kernel-hub inspect`: what an image holds: a cubin, fatbin or PTX file, or a shipped name."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..cubin import (
    CubinInfo,
    PtxInfo,
    SectionInfo,
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
    nearest,
)
from ..manifest import CubinEntry, open_collection
from . import _console, _sass

NAME = "inspect"
HELP = "show what a cubin, fatbin or PTX file, or a shipped cubin, holds"
EXAMPLE = "kernel-hub inspect rms_norm --arch sm90 --function rms_norm_bf16_vec1 --sass"
_OWNED = re.compile(r"(\.nv\.(?:info|shared|local|constant\d+)|\.text|\.rela?\.\w+)\.")


@dataclasses.dataclass(frozen=True)
class Image:
    """One image to describe: its bytes, and the manifest's entry when it is shipped."""

    label: str
    data: bytes = dataclasses.field(repr=False)
    entry: CubinEntry | None = None


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", metavar="FILE|NAME", help="a file, or the name of a shipped cubin")
    parser.add_argument("--package", default="kernel_hub", help="whose cubins NAME is one of")
    parser.add_argument("--arch", metavar="SM", help="of a shipped cubin, only this: sm80 …")
    parser.add_argument("--function", metavar="NAME", help="only this kernel")
    parser.add_argument("--sass", action="store_true", help="disassemble (needs nvdisasm)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def images(asked: str, *, package: str = "kernel_hub", arch: str | None = None) -> list[Image]:
    """The images `asked` stands for: one file, or a shipped cubin of each architecture."""
    path = Path(asked)
    if path.is_file():
        return [Image(str(path), path.read_bytes())]
    collection = open_collection(package)
    name = asked.removesuffix(".cubin").removesuffix(".fatbin")
    if name not in collection.manifest.cubins:
        shipped = ", ".join(nearest(name, collection.manifest.cubins)[:8])
        raise CubinNotFoundError(
            f"{asked} is neither a file nor a cubin that {package} ships; it ships: {shipped}"
        )
    entries = collection.manifest.cubins[name]
    if arch is not None and arch not in entries:
        raise CubinNotFoundError(f"{name} is shipped for {', '.join(sorted(entries))}, not {arch}")
    return [
        Image(entry.file, collection.read(entry), entry)
        for key, entry in sorted(entries.items())
        if arch in (None, key)
    ]


def describe(image: Image) -> dict[str, Any]:
    """Everything known of an image, as JSON would hold it. Raises CubinCorruptError."""
    try:
        kind = image_kind(image.data)
        reader = {"cubin": _cubin, "fatbin": _fatbin, "ptx": _ptx}[kind]
        return {"image": image.label, "kind": kind, "size_bytes": len(image.data), **reader(image)}
    except CubinCorruptError as error:
        raise CubinCorruptError(f"{image.label}: {error}") from error


def _cubin(image: Image) -> dict[str, Any]:
    info = read_cubin(image.data)
    described = dataclasses.asdict(info)
    declared = image.entry.functions if image.entry else {}
    described["functions"] = {
        name: {"signature": _signature(info, name, declared), **function}
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


def _signature(info: CubinInfo, name: str, declared: Any) -> str:
    """With names and types where a manifest gives them, else sizes: all a cubin itself holds."""
    if name in declared:
        params = [f"{p.type} {p.name}" for p in declared[name].params]
    else:
        params = [f"<{p.size_bytes} bytes>" for p in info.functions[name].params]
    return f"{name}({', '.join(params)})"


def _fatbin(image: Image) -> dict[str, Any]:
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
            row["contents"] = describe(Image(f"{image.label} entry {number}", entry.image))
        entries.append(row)
    return {"entries": entries}


def _ptx(image: Image) -> dict[str, Any]:
    info: PtxInfo = read_ptx(image.data)
    functions = {
        name: {
            "signature": f"{name}({', '.join(f'{p.type} {p.name}' for p in params)})",
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


def only_function(described: dict[str, Any], name: str) -> dict[str, Any]:
    """`described` with that kernel alone."""
    functions = described.get("functions", {})
    if name not in functions:
        raise FunctionNotFoundError.among(name, functions, described["image"])
    return {**described, "functions": {name: functions[name]}}


def section_groups(sections: Iterable[SectionInfo]) -> list[tuple[str, int, int]]:
    """(name, how many, bytes), the sections that each function has its own of counted as one."""
    groups: dict[str, list[int]] = {}
    for section in sections:
        owned = _OWNED.match(section.name)
        name = f"{owned[1]}.*" if owned else section.name
        groups.setdefault(name, []).append(section.size_bytes)
    return [(name, len(sizes), sum(sizes)) for name, sizes in groups.items()]


def run(args: argparse.Namespace) -> int:
    found = images(args.image, package=args.package, arch=args.arch)
    described = [describe(image) for image in found]
    if args.function:
        described = [only_function(one, args.function) for one in described]
    if args.json:
        _console.as_json(described)
        return 0
    for image, one in zip(found, described, strict=True):
        _print(one)
        if args.sass:
            if one["kind"] != "cubin":
                raise KernelHubError(f"--sass reads cubins; {one['image']} is {one['kind']}")
            _console.note(_sass.disassemble(image.data, args.function))
    return 0


def _print(one: dict[str, Any]) -> None:
    _console.heading(f"{one['image']}: {one['kind']}, {_console.size(one['size_bytes'])}")
    if one["kind"] == "fatbin":
        for entry in one["entries"]:
            notes = [_console.size(entry["size_bytes"])]
            if "version" in entry:
                notes.append("PTX {}.{}".format(*entry["version"]))
            if entry["compressed"]:
                notes.append("compressed")
            if "unread" in entry:
                notes.append(f"not read ({entry['unread']})")
            elif "contents" not in entry:
                notes.append("only the driver can unpack it (zstd: install kernel_hub[fatbin])")
            _console.note(f"  {entry['kind']} {entry['target']}, {', '.join(notes)}")
            if "contents" in entry:
                _print(entry["contents"])
        return
    if one["kind"] == "ptx":
        version = ".".join(map(str, one["version"]))
        needed = "{}.{}".format(*divmod(one["minimum_driver"] // 10, 100))
        suffix = one["target"][-1]
        gpus = {"a": "exactly that GPU", "f": "its family"}.get(suffix, "that GPU and later ones")
        _console.note(
            f"  PTX {version} for {one['target']} ({gpus}): a driver of CUDA {needed} or later "
            "compiles it at load"
        )
        for function in one["functions"].values():
            _console.note(f"  {function['signature']}")
        return
    _print_cubin(one)


def _print_cubin(one: dict[str, Any]) -> None:
    toolkit = ".".join(map(str, one["toolkit"])) if one["toolkit"] else "unknown"
    exact = ", this architecture alone" if one["arch_specific"] else ""
    _console.note(
        f"  for {one['target']}{exact}; toolkit {toolkit}; "
        f"ELF ABI {one['os_abi']:#x} version {one['abi_version']}"
    )
    if "manifest" in one:
        told = one["manifest"]
        _console.note(f"  sha256 {told['sha256']}, from {told['source']}")
        _console.note(f"  nvcc {told['toolkit']} {' '.join(told['flags'])}")
    _console.table(
        ["kernel", "params", "registers", "static shared", "local", "threads", "code"],
        [
            (
                function["name"],
                len(function["params"]),
                function["num_regs"],
                function["static_shared_bytes"],
                function["local_bytes"],
                _threads(function),
                function["code_bytes"],
            )
            for function in one["functions"].values()
        ],
        right=["params", "registers", "static shared", "local", "code"],
    )
    for function in one["functions"].values():
        _console.note(f"  {function['signature']}")
    if one["globals"]:
        _console.table(
            ["variable", "bytes", "section"],
            [(g["name"], g["size_bytes"], g["section"]) for g in one["globals"].values()],
            right=["bytes"],
        )
    groups = section_groups(SectionInfo(**section) for section in one["sections"])
    _console.table(["section", "number", "bytes"], groups, right=["number", "bytes"])


def _threads(function: dict[str, Any]) -> str:
    """What a launch may or must use: block, cluster, cooperative."""
    parts = []
    if function["required_block"]:
        parts.append("exactly " + " x ".join(map(str, function["required_block"])))
    elif function["max_threads"]:
        parts.append(f"at most {function['max_threads']}")
    if function["cluster"]:
        parts.append("cluster " + " x ".join(map(str, function["cluster"])))
    if function["cooperative"]:
        parts.append("cooperative")
    return ", ".join(parts) or "any"
