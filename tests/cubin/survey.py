"""Reads the GPU code of a folder of wheels and reports every image that is refused. A script.

    python tests/cubin/survey.py WHEELS --most 200 --seed 1 --json OUT.json --save DIR

Takes wheels, zip files, libraries, cubins, fatbins and C arrays. Of what lies in one file `--most`
entries of sm_70 and newer are drawn by lot. With `--cuobjdump PATH` its word on registers, shared
memory and stack is held against ours. The aim is 0 refusals; what is taken as unknown is counted.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import hashlib
import json
import random
import re
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from kernel_hub.cubin import read_cubin, unpack  # noqa: E402
from kernel_hub.errors import KernelHubError  # noqa: E402
from kernel_hub.formats import carray  # noqa: E402

FATBIN = struct.pack("<IHH", 0xBA55ED50, 1, 16)
ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
CUDA_ELF = b"\x7fELF\x02\x01\x01"
OLDEST = 70
LZ4, ZSTD = unpack.LZ4, unpack.ZSTD


class Found(NamedTuple):
    """A place that holds one cubin: bytes packed by `method` (0: plain), `size` once unpacked."""

    packed: bytes
    method: int
    size: int


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of every file in a wheel, or of the file itself."""
    if path.suffix not in (".whl", ".zip"):
        yield path.name, path.read_bytes()
        return
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.is_dir() and member.file_size > 500:
                yield f"{path.name}:{member.filename}", archive.read(member)


def cubins_in(name: str, data: bytes) -> list[Found]:
    """Every cubin for sm_70 or newer in one file: its own bytes, fatbins in it, or C arrays."""
    if name.endswith((".cpp", ".c", ".cu", ".h", ".inc")):
        if b"0x7f" not in data.lower():
            return []
        try:
            arrays = carray.loads(data.decode(errors="replace"))
        except (KernelHubError, AttributeError):
            return []
        return [each for image in arrays.values() for each in cubins_in("array", image)]
    found = []
    if data[:7] == CUDA_ELF and is_cubin(data):
        return [Found(data, 0, len(data))]
    at = data.find(FATBIN)
    while at >= 0:
        (size,) = struct.unpack_from("<Q", data, at + 8)
        end = at + 16 + size
        if size and end <= len(data):
            found += entries_of(data, at + 16, end)
        at = data.find(FATBIN, at + 16)
    return found


def is_cubin(data: bytes) -> bool:
    """An ELF for CUDA, and of sm_70 or newer by either layout of e_flags."""
    machine, flags = struct.unpack_from("<H", data, 18)[0], struct.unpack_from("<I", data, 48)[0]
    sm = flags >> 8 & 0xFF if data[7] == 0x41 else flags & 0xFF
    return bool(machine == 190 and sm >= OLDEST and data[16] == 2)


def entries_of(data: bytes, at: int, end: int) -> Iterator[Found]:
    """The cubins for sm_70 and newer of one fatbin's entries; the frame is not what is judged."""
    while at + ENTRY.size <= end:
        kind, _, header, size, packed, _, _, _, sm, _, _, flags, _, unpacked = ENTRY.unpack_from(
            data, at
        )
        if header < ENTRY.size or size > end - at - header:
            return
        start = at + header
        if kind == 2 and sm >= OLDEST:
            method = flags & (LZ4 | ZSTD)
            if method:
                yield Found(data[start : start + packed], method, unpacked)
            elif data[start + 16] == 2:
                yield Found(data[start : start + size], 0, size)
        at = start + size


def unpacked(found: Found) -> bytes | None:
    """The cubin itself; the package lz4, where it is installed, does in C what unpack does."""
    if found.method == 0:
        return found.packed
    if found.method == LZ4:
        try:
            import lz4.block

            return bytes(lz4.block.decompress(found.packed, uncompressed_size=found.size))
        except ImportError:
            pass
    return unpack.unpack(found.packed, found.method, found.size, 0)


def survey(path: Path, options: argparse.Namespace) -> dict[str, object]:
    """Read what one wheel or file holds."""
    rng = random.Random(f"{options.seed} {path.name}")
    counts: collections.Counter[str] = collections.Counter()
    refused: dict[str, list[str]] = collections.defaultdict(list)
    unknown: dict[str, list[str]] = collections.defaultdict(list)
    wrong: list[str] = []
    seen: set[str] = set()
    for name, data in members(path):
        found = cubins_in(name, data)
        counts["found"] += len(found)
        for each in rng.sample(found, min(options.most, len(found))):
            image = unpacked(each)
            if image is None:
                counts["packed"] += 1
                continue
            digest = hashlib.sha256(image).hexdigest()[:16]
            if digest in seen or not is_cubin(image):
                continue
            seen.add(digest)
            counts["read"] += 1
            place = f"{name} {digest}"
            try:
                info = read_cubin(image)
            except KernelHubError as error:
                refused[pattern(str(error))].append(place)
                save(options, image, digest)
                continue
            for text in getattr(info, "unknown", ()):
                unknown[pattern(text)].append(place)
            counts["unknown"] += bool(getattr(info, "unknown", ()))
            counts["functions"] += len(info.functions)
            if options.cuobjdump and counts["judged"] < options.judge:
                counts["judged"] += 1
                wrong += [f"{place}: {text}" for text in judge(options.cuobjdump, image, info)]
    return {
        "path": path.name, "counts": dict(counts), "refused": refused, "unknown": unknown,
        "wrong": wrong,
    }  # fmt: skip


def pattern(text: str) -> str:
    """A message without what differs between two images that fail alike."""
    text = re.sub(
        r"section \.(text|nv\.info|nv\.shared|nv\.constant\d|rel\w*\.\w+)\.\S+",
        r"section .\1.…",
        text,
    )
    text = re.sub(r"(function|kernel|variable) \S+", r"\1 …", text)
    return re.sub(r"\b(0x[0-9a-f]{3,}|\d{2,})\b", "N", text)[:200]


def save(options: argparse.Namespace, image: bytes, digest: str) -> None:
    """Keep a refused image to look at."""
    if options.save:
        (Path(options.save) / f"{digest}.cubin").write_bytes(image)


_USAGE = re.compile(r"Function (\S+):\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def judge(tool: str, image: bytes, info: object) -> list[str]:
    """What cuobjdump says otherwise of the kernels of `image`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=False
        )
    told = {m[0]: tuple(map(int, m[1:])) for m in _USAGE.findall(done.stdout)}
    if not told:
        return []
    differs = []
    for name, function in info.functions.items():  # type: ignore[attr-defined]
        if name not in told:
            differs.append(f"{name} is unknown to cuobjdump")
            continue
        regs, _, shared, _ = told[name]
        if regs != function.num_regs:
            differs.append(f"{name}: {function.num_regs} registers, cuobjdump {regs}")
        # From sm_90 on it counts the KiB that the driver keeps, where a kernel has shared memory.
        if shared not in (function.static_shared_bytes, function.static_shared_bytes + 1024):
            differs.append(f"{name}: {function.static_shared_bytes} shared, cuobjdump {shared}")
    return differs


def main() -> None:
    """Survey every file of the folder, two at a time, and print what was refused, and why."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, default=200, help="cubins of one file, drawn by lot")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cuobjdump", default="", help="judge of the facts read")
    parser.add_argument("--judge", type=int, default=20, help="cubins of a file that it judges")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--save", help="write refused images into this folder")
    options = parser.parse_args()
    if options.save:
        Path(options.save).mkdir(parents=True, exist_ok=True)
    paths = [options.folder] if options.folder.is_file() else sorted(options.folder.iterdir())
    paths = [path for path in paths if path.is_file() and path.suffix != ".txt"]
    started = time.monotonic()
    total: collections.Counter[str] = collections.Counter()
    results = []
    refused: collections.Counter[str] = collections.Counter()
    unknown: collections.Counter[str] = collections.Counter()
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for result in pool.map(survey, paths, [options] * len(paths)):
            results.append(result)
            total.update(result["counts"])
            for kind, counter in (("refused", refused), ("unknown", unknown)):
                counter.update({text: len(places) for text, places in result[kind].items()})
            lost = sum(len(places) for places in result["refused"].values())
            print(f"{result['path'][:60]:60} {result['counts']} refused {lost}", flush=True)
    print(f"{dict(total)} in {time.monotonic() - started:.0f} s, seed {options.seed}")
    for title, counter in (("refused", refused), ("unknown", unknown)):
        print(f"{title}: {sum(counter.values())}")
        for text, count in counter.most_common():
            print(f"{count:6} {text}")
    for result in results:
        for text in result["wrong"][:10]:
            print("differs:", text)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
