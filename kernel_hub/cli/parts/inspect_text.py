"""What `kernel-hub inspect` prints of an image: its head, its kernels, its sections."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ...cubin import SectionInfo
from . import console

MOST_SHOWN = 16  # kernels of one image, on a terminal
Described = dict[str, Any]
_OWNED = re.compile(r"(\.nv\.(?:info|shared|local|constant\d+)|\.text|\.rela?\.\w+)\.")


def show(one: Described, sums_up: bool) -> None:
    """Print an image as `inspect.describe` gives it; sums_up: not every kernel of many."""
    console.heading(f"{one['image']}: {one['kind']}, {console.size(one['size_bytes'])}")
    if one["kind"] == "fatbin":
        for entry in one["entries"]:
            notes = [console.size(entry["size_bytes"])]
            if "version" in entry:
                notes.append("PTX {}.{}".format(*entry["version"]))
            if entry["compressed"]:
                notes.append("compressed")
            if "unread" in entry:
                notes.append(f"not read, because {entry['unread']}")
            elif "contents" not in entry:
                notes.append("only the driver can unpack it (zstd: install kernel_hub[fatbin])")
            console.note(f"  {entry['kind']} {entry['target']}, {', '.join(notes)}")
            if "contents" in entry:
                show(entry["contents"], sums_up)
        return
    if one["kind"] == "ptx":
        version = ".".join(map(str, one["version"]))
        needed = "{}.{}".format(*divmod(one["minimum_driver"] // 10, 100))
        suffix = one["target"][-1]
        gpus = {"a": "exactly that GPU", "f": "its family"}.get(suffix, "that GPU and later ones")
        console.note(
            f"  PTX {version} for {one['target']} ({gpus}): a driver of CUDA {needed} or later "
            "compiles it at load"
        )
        _print_signatures(one, sums_up)
        return
    _print_cubin(one, sums_up)


def _print_cubin(one: Described, sums_up: bool) -> None:
    toolkit = ".".join(map(str, one["toolkit"])) if one["toolkit"] else "unknown"
    exact = ", this architecture alone" if one["arch_specific"] else ""
    console.note(
        f"  for {one['target']}{exact}; toolkit {toolkit}; "
        f"ELF ABI {one['os_abi']:#x} version {one['abi_version']}"
    )
    for what in one["unknown"]:
        console.note(f"  unknown: {what}")
    if "manifest" in one:
        told = one["manifest"]
        console.note(f"  sha256 {told['sha256']}")
        nvcc = "nvcc " if told["toolkit"][:1].isdigit() else ""  # others say who they are
        console.note(f"  {told['source']} by {nvcc}{told['toolkit']} {' '.join(told['flags'])}")
    shown = list(one["functions"].values())[: MOST_SHOWN if sums_up else None]
    console.table(
        ["kernel", "params", "registers", "static shared", "local", "threads", "code"],
        [
            (
                function["cxx_name"],
                len(function["params"]),
                function["num_regs"],
                function["static_shared_bytes"],
                function["local_bytes"],
                threads(function),
                function["code_bytes"],
            )
            for function in shown
        ],
        right=["params", "registers", "static shared", "local", "code"],
        once=["static shared", "local", "threads"],
        wraps=["threads"],
    )
    if more := len(one["functions"]) - len(shown):
        console.note(f"… and {more} more (--functions shows all, --function NAME one)")
    _print_signatures(one, sums_up)
    if one["globals"]:
        console.table(
            ["variable", "bytes", "section"],
            [(g["name"], g["size_bytes"], g["section"]) for g in one["globals"].values()],
            right=["bytes"],
        )
    groups = section_groups(SectionInfo(**section) for section in one["sections"])
    console.table(["section", "number", "bytes"], groups, right=["number", "bytes"])


def _print_signatures(one: Described, sums_up: bool) -> None:
    """Each kernel by its C++ name, then by the one it has in the image."""
    if sums_up and len(one["functions"]) > MOST_SHOWN:
        params = {f["signature"].removeprefix(name) for name, f in one["functions"].items()}
        number = console.count(len(params), "list")
        console.note(f"{number} of parameters in all; --function NAME shows a kernel's")
        return
    for name, function in one["functions"].items():
        console.note(f"  {function['cxx_name']}{function['signature'].removeprefix(name)}")
        if function["cxx_name"] != name:
            console.note(f"    {name}")
        if launch := function.get("launch"):
            console.note(f"    gridDim {launch['grid']}")
            if launch["described"]:
                console.note(f"    {launch['described']}")


def threads(function: dict[str, Any]) -> str:
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


def section_groups(sections: Iterable[SectionInfo]) -> list[tuple[str, int, int]]:
    """(name, how many, bytes), the sections that each function has its own of counted as one."""
    groups: dict[str, list[int]] = {}
    for section in sections:
        owned = _OWNED.match(section.name)
        name = f"{owned[1]}.*" if owned else section.name
        groups.setdefault(name, []).append(section.size_bytes)
    return [(name, len(sizes), sum(sizes)) for name, sizes in groups.items()]
