"""Hopper cubins disassembled: which functions multiply on the tensor cores, and in which loops.

By nvdisasm, one process a cubin; `record_sass.py` writes down what is found, and of which bytes.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kernel_hub.cli.parts.sass import find_nvdisasm
from kernel_hub.collection.manifest import CubinEntry, open_collection
from kernel_hub.cubin import read_cubin

RECORD = Path(__file__).with_name("sass_loops.json")
PRODUCT = re.compile(r"\b([HQI]GMMA)\b")
_MEMORY = re.compile(r"\b(?:LD|ST|LDG|STG|LDGSTS|ATOM|ATOMG|RED|UBLKCP|UTMALDG|EXIT)\b")
LOCAL = re.compile(r"\b(?:LDL|STL)\b")
_SECTION = re.compile(r"^//-+ \.text\.(\S+)\s+-+\n", re.MULTILINE)
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*)")
_LABEL = re.compile(r"(\.L_\w+):")
_TARGET = re.compile(r"\.L_\w+")
_JUMP = re.compile(r"\b(?:BRA|BRX|JMP|JMX)\b")
_END = re.compile(r"^\s*(?:@!?U?P\w+\s+)?(?:EXIT|RET|BRA|BRX|JMP|JMX)\b")
_GUARD = re.compile(r"^@!?U?P\d")


class Loop(NamedTuple):
    """An innermost loop that multiplies: its instructions, and how many are of certain kinds."""

    num_instructions: int
    num_products: int
    num_local: int


class Function(NamedTuple):
    """One function: its products by mnemonic, loops from the front, local memory a thread."""

    products: frozenset[str]
    loops: tuple[Loop, ...]
    local_bytes: int


def hopper_cubins() -> list[CubinEntry]:
    """All that were built from a *_sm90.cu, the largest first."""
    found = open_collection().manifest.cubins
    entries = [found[name]["sm90"] for name in found if name.endswith("_sm90")]
    return sorted(entries, key=lambda entry: -entry.size_bytes)


@functools.cache
def functions(cubin: str) -> dict[str, Function]:
    """What the code of each function is. Seconds, once a process."""
    (entry,) = (each for each in hopper_cubins() if each.name == cubin)
    info = read_cubin(_file(entry).read_bytes())
    parts = _SECTION.split(_disassemble(str(_file(entry))))
    return {
        name: _function(body, info.functions[name].local_bytes)
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
        if name in info.functions
    }


def ahead_of_wait(entry: CubinEntry) -> dict[str, list[str]]:
    """Of each function, what accesses memory before it waits for the launch before; or that."""
    parts = _SECTION.split(_disassemble(str(_file(entry))))
    found = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        code = [match[1] for line in body.splitlines() if (match := _INSTRUCTION.match(line))]
        waits = [i for i, each in enumerate(code) if "ACQBULK" in each]
        ahead = code[: waits[0]] if waits else ["no ACQBULK"]
        found[name] = [each for each in ahead if not waits or _MEMORY.search(each)]
    return found


def is_recorded(entry: CubinEntry) -> bool:
    """Whether what `record_sass.py` wrote is of these very bytes."""
    return recorded_digests().get(entry.name) == entry.sha256


def _file(entry: CubinEntry) -> Path:
    return Path(str(open_collection().root), *entry.file.split("/"))


def _disassemble(file: str) -> str:
    tool = find_nvdisasm()
    assert tool is not None
    done = subprocess.run([tool, "-c", file], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} -c {os.path.basename(file)}: {done.stderr.strip()}")
    return done.stdout


def _function(body: str, local_bytes: int) -> Function:
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in body.splitlines():
        if match := _INSTRUCTION.match(line):
            code.append(match[1])
        elif match := _LABEL.match(line):
            labels[match[1]] = len(code)
    products = frozenset(match[1] for each in code if (match := PRODUCT.search(each)))
    return Function(products, product_loops(code, labels), local_bytes)


def product_loops(code: Sequence[str], labels: dict[str, int]) -> tuple[Loop, ...]:
    """The innermost loops of `code` that hold a product, in the order of their heads.

    Loops are the natural ones of the control flow graph: blocks the compiler moved out of line,
    such as the second look at a barrier, count where they belong.
    """
    starts, follow = _blocks(code, labels)
    bodies = _natural_loops(follow)
    spans = [*zip(starts, [*starts[1:], len(code)], strict=True)]

    def count(body: Iterable[int], pattern: re.Pattern[str]) -> int:
        return sum(bool(pattern.search(each)) for b in body for each in code[slice(*spans[b])])

    multiply = {head: body for head, body in bodies.items() if count(body, PRODUCT)}
    made = []
    for head, body in sorted(multiply.items()):
        if not any(other != head and other in body for other in multiply):
            size = sum(stop - start for start, stop in (spans[b] for b in body))
            made.append(Loop(size, count(body, PRODUCT), count(body, LOCAL)))
    return tuple(made)


def _blocks(code: Sequence[str], labels: dict[str, int]) -> tuple[list[int], list[list[int]]]:
    """First instruction of each basic block, and the blocks that may follow it."""
    starts = {0, *(place for place in labels.values() if place < len(code))}
    starts |= {i + 1 for i, each in enumerate(code[:-1]) if _END.match(each)}
    ordered = sorted(starts)
    index = {start: i for i, start in enumerate(ordered)}
    follow: list[list[int]] = []
    for i in range(len(ordered)):
        stop = ordered[i + 1] if i + 1 < len(ordered) else len(code)
        last = code[stop - 1]
        after: list[int] = []
        if _JUMP.search(last):
            places = (labels.get(name, len(code)) for name in _TARGET.findall(last))
            after += [index[place] for place in places if place in index]
        if stop < len(code) and (not _END.match(last) or _GUARD.match(last)):
            after.append(i + 1)
        follow.append(after)
    return ordered, follow


def _natural_loops(follow: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Head -> blocks of the loops: of each edge to a block that dominates the edge's start."""
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(follow[0]))]
    while stack:
        block, rest = stack[-1]
        following = next((b for b in rest if b not in seen), None)
        if following is None:
            order.append(stack.pop()[0])
        else:
            seen.add(following)
            stack.append((following, iter(follow[following])))
    number = {block: i for i, block in enumerate(order)}
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for following in follow[block]:
            before[following].append(block)
    dominator = {0: 0}

    def meet(a: int, b: int) -> int:
        while a != b:
            while number[a] < number[b]:
                a = dominator[a]
            while number[b] < number[a]:
                b = dominator[b]
        return a

    changed = True
    while changed:
        changed = False
        for block in reversed(order[:-1]):
            known = [b for b in before[block] if b in dominator]
            found = functools.reduce(meet, known)
            if dominator.get(block) != found:
                dominator[block], changed = found, True
    loops: dict[int, set[int]] = {}
    for block in order:
        for head in follow[block]:
            if meet(block, head) == head:
                body = loops.setdefault(head, {head})
                waiting = [block]
                while waiting:
                    each = waiting.pop()
                    if each not in body:
                        body.add(each)
                        waiting += before[each]
    return loops


def to_json(found: Iterable[CubinEntry]) -> str:
    """One function a line: bytes of local memory, loops as [instructions, products, local].

    The last is how many of the instructions read or write local memory. Before a cubin's functions
    its digest.
    """
    blocks = []
    for entry in sorted(found, key=lambda entry: entry.name):
        lines = [f'  "sha256": {json.dumps(entry.sha256)}']
        for name, row in rows(entry.name).items():
            lines.append(f"  {json.dumps(name)}: {json.dumps(row)}")
        blocks.append(f" {json.dumps(entry.name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def rows(cubin: str) -> dict[str, dict[str, Any]]:
    """What is recorded of each of its functions."""
    return {
        name: {
            "loops": [[x.num_instructions, x.num_products, x.num_local] for x in function.loops],
            "local_bytes": function.local_bytes,
        }
        for name, function in sorted(functions(cubin).items())
    }


def recorded() -> dict[str, dict[str, dict[str, Any]]]:
    """What `record_sass.py` wrote: cubin -> function -> row."""
    return {
        cubin: {name: row for name, row in table.items() if name != "sha256"}
        for cubin, table in _record().items()
    }


def recorded_digests() -> dict[str, str]:
    """Cubin -> digest of what was disassembled."""
    return {cubin: table.get("sha256", "") for cubin, table in _record().items()}


def _record() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return table
