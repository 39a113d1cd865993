"""csrc/**/*.cu x architectures -> cubins/<arch>/<name>.cubin + cubins/manifest.json.

Run as `python -m kernel_hub.build`; build_cubins.sh is that command. Needs nvcc and the standard
library, never a GPU. The runtime does not import it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from .archs import ARCHS, tokens_of
from .collection.manifest import CubinEntry, Manifest
from .collection.manifest_write import function_entry, locked, write
from .compilers.declarations import match_params, read_prototypes
from .compilers.launch_facts import read_launch_facts
from .compilers.nvcc import (
    Compiled,
    Job,
    Nvcc,
    built_for,
    compile_cubin,
    compile_described,
    find_nvcc,
    find_sources,
    make_jobs,
    only_arch,
)
from .cubin import read_cubin, read_ptx
from .errors import CubinCorruptError, KernelHubError, ParamsError, listed, nearest

LOT = "KERNEL_HUB_LOT"
ENTRY_POINT_GROUP = "kernel_hub.cubins"  # as in registry.py, which needs more than building does
_ANNOUNCED = re.compile(
    rf"""^\[project\.entry-points\.["']{re.escape(ENTRY_POINT_GROUP)}["']\][^\[]*?"""
    r"""^[\w."'-]+\s*=\s*["']([\w.]+)["']""",
    re.MULTILINE,
)

Entries = dict[tuple[str, str], CubinEntry]  # by (name, arch)


def main(argv: Sequence[str] | None = None, command: argparse.ArgumentParser | None = None) -> int:
    """Builds, or with --check compares; returns the exit status. command: what `parser` made."""
    args = _parse(argv, command or parser("python -m kernel_hub.build"))
    try:
        nvcc = find_nvcc()
        jobs, wanted = _plan(args.csrc, args.arch, args.only, nvcc)
        if args.check:
            return _check(args.out, jobs, nvcc, args.jobs, one_in=args.one_in)
        with locked(args.out):
            return _build(args.out, jobs, wanted, nvcc, args.jobs, anew=args.clean)
    except KernelHubError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or args.out}: {error.strerror}", file=sys.stderr)
        return 1


def places(start: Path) -> tuple[Path, Path] | None:
    """(folder of sources, folder of cubins) of the project around `start`, else of a checkout.

    A project is a folder whose pyproject.toml names its package under ENTRY_POINT_GROUP, as those
    of `kernel-hub new` do. None where there is neither: an installed kernel_hub has no sources.
    """
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        if found := _ANNOUNCED.search(text):
            return folder / "csrc", folder.joinpath(*found[1].split("."), "cubins")
    root = Path(__file__).resolve().parent.parent
    return (root / "csrc", root / "cubins") if (root / "csrc").is_dir() else None


def parser(
    prog: str, make: type[argparse.ArgumentParser] = argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """The builder's command line."""
    parser = make(
        prog=prog,
        description="Build csrc/**/*.cu into cubins/ and write cubins/manifest.json. "
        "$NVCC names the compiler to use.",
    )
    parser.add_argument(
        "--csrc",
        type=Path,
        metavar="DIR",
        help="folder of the .cu files, together with --out (default: that of the project here, "
        "else of the checkout)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (likewise)")
    parser.add_argument(
        "--arch",
        action="append",
        metavar="SM,SM",
        help=f"architectures: sm80,sm90 (or sm_90, 90); repeatable (default {','.join(ARCHS)})",
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="just this one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--clean", action="store_true", help="build what is unchanged too")
    parser.add_argument(
        "--check",
        action="store_true",
        help="build from a copy elsewhere, compare with what is there byte for byte, write nothing",
    )
    parser.add_argument(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help=f"with --check: of N cubins build one, drawn by lot (the same where {LOT} is the same "
        "number); of all are digests compared, of sources, flags, toolkit and bytes",
    )
    return parser


def _parse(argv: Sequence[str] | None, made: argparse.ArgumentParser) -> argparse.Namespace:
    args = made.parse_args(argv)
    if args.csrc is not None and args.out is None:
        made.error(
            f"--csrc {args.csrc} without --out: say where to write (a project's own cubins would "
            "lose those that have no source there)"
        )
    if args.csrc is None or args.out is None:
        found = places(Path.cwd())
        if found is None:
            made.error(
                "no sources here: run it in a project, as `kernel-hub new` writes one (its "
                f"pyproject.toml names the package under {ENTRY_POINT_GROUP}), or give --csrc and "
                "--out"
            )
        args.csrc, args.out = args.csrc or found[0], args.out or found[1]
    try:
        args.arch = tokens_of(args.arch or ARCHS, "--arch")
    except ParamsError as error:
        made.error(str(error))
    for arch in args.arch:
        if not arch[2:].isdigit():
            made.error(
                f"--arch={arch!r}: tokens like sm80 or sm90; NAME_sm90.cu is built for "
                "that architecture's own instructions"
            )
    for option, number in (("--jobs", args.jobs), ("--one-in", args.one_in)):
        if number < 1:
            made.error(f"{option} takes a number from 1 up, not {number}")
    if args.one_in > 1 and not args.check:
        made.error("--one-in is of --check: a build leaves out nothing")
    args.csrc, args.out = args.csrc.resolve(), args.out.resolve()
    return args


def _plan(
    csrc: Path, archs: list[str], only: list[str], nvcc: Nvcc
) -> tuple[list[Job], set[tuple[str, str]]]:
    """The jobs asked for, and every (name, arch) that may stay in the manifest."""
    sources = find_sources(csrc)
    if not sources:
        raise KernelHubError(f"no .cu file in {csrc}")
    for name in only:
        if name not in sources:
            raise KernelHubError(
                f"--only {name}: no {name}.cu in {csrc.name}; there are "
                f"{listed(nearest(name, sources), 8)}"
            )
    jobs = []
    for name in only or sources:
        asked = built_for(sources[name], archs)
        jobs += make_jobs(sources[name], asked, nvcc.version, csrc)
    # An architecture left out of --arch today is not stale: only a vanished source is.
    kept = {(name, arch) for name, path in sources.items() for arch in _every_arch(path)}
    return jobs, kept | {(job.name, job.arch) for job in jobs}


def _every_arch(source: Path) -> list[str]:
    one = only_arch(source)
    return [one] if one else built_for(source, ARCHS)


def _load(out: Path) -> tuple[Entries, dict[str, str]]:
    """The manifest's cubins and other files; none where it is not there or cannot be read."""
    file = out / "manifest.json"
    if not file.exists():
        return {}, {}
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        manifest = Manifest.from_json(text, where=str(file))
        entries = {}
        for name, archs in manifest.cubins.items():
            for arch, entry in archs.items():
                list(entry.functions.values())  # decoded now, so that a bad field shows here
                entries[name, arch] = entry
        return entries, dict(manifest.files)
    except CubinCorruptError as error:
        print(f"note: building everything anew: {error}", file=sys.stderr)
        return {}, {}


def _unchanged(out: Path, job: Job, entry: CubinEntry | None) -> bool:
    if entry is None or entry.source_sha256 != job.source_sha256:
        return False
    file = out / entry.file
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == entry.sha256


def _build(
    out: Path,
    jobs: list[Job],
    kept: set[tuple[str, str]],
    nvcc: Nvcc,
    num_jobs: int,
    *,
    anew: bool,
) -> int:
    started = time.perf_counter()
    found, files = _load(out)
    entries = {key: entry for key, entry in found.items() if key in kept}
    todo = [j for j in jobs if anew or not _unchanged(out, j, entries.get((j.name, j.arch)))]
    num_failed = 0
    for job, result in _compile_all(todo, nvcc, num_jobs):
        if isinstance(result, KernelHubError):
            num_failed += 1
            continue
        entry, image = result
        write(out / entry.file, image)
        entries[job.name, job.arch] = entry
    tables: dict[str, dict[str, CubinEntry]] = {}
    for (name, arch), entry in entries.items():
        tables.setdefault(name, {})[arch] = entry
    text = Manifest(tables, files).to_json().encode()
    manifest = out / "manifest.json"
    if not manifest.exists() or manifest.read_bytes() != text:
        write(manifest, text)
    shipped = {out / entry.file for entry in entries.values()}
    stale = [file for file in out.glob("sm*/*.cubin") if file not in shipped]
    for file in stale:
        file.unlink()
        print(f"removed {file.relative_to(out)}: no source is built for it")
    print(
        f"{len(entries)} cubins in {_shown(out)}: {len(todo) - num_failed} built, "
        f"{len(jobs) - len(todo)} unchanged, {len(stale)} removed"
        + (f", {num_failed} FAILED" if num_failed else "")
        + f" (nvcc {nvcc.version}, {time.perf_counter() - started:.1f} s)"
    )
    return 1 if num_failed else 0


def _check(out: Path, jobs: list[Job], nvcc: Nvcc, num_jobs: int, *, one_in: int) -> int:
    """Compares every job's digests, and what is built from a copy in another folder byte for byte.

    All that decides a cubin's bytes is in its source_sha256: a source, header or flag that was
    edited, or another toolkit, shows without a build. A build shows the rest: a cubin that nvcc did
    not make of them, and a manifest that tells of it otherwise.
    """
    entries, _ = _load(out)
    csrc = jobs[0].csrc
    wrong = {}
    for job in jobs:
        entry = entries.get((job.name, job.arch))
        if entry is None:
            wrong[job.file] = "not in the manifest"
        elif not _unchanged(out, job, entry):
            why = "" if entry.toolkit == nvcc.version else f" (nvcc {entry.toolkit} then)"
            wrong[job.file] = f"edited, or of another source, flags or toolkit{why}"
    lot = os.environ.get(LOT) or str(random.SystemRandom().randrange(10**6))
    sizes = {entry.file: entry.size_bytes for entry in entries.values()}
    drawn = [] if wrong else jobs if one_in == 1 else _one_in(one_in, jobs, sizes, lot)
    with tempfile.TemporaryDirectory(prefix="kernel_hub_check_") as scratch:
        copy = Path(scratch, csrc.name)
        shutil.copytree(csrc, copy)
        elsewhere = [
            job
            for j in drawn
            for job in make_jobs(copy / j.source.relative_to(csrc), [j.arch], nvcc.version, copy)
        ]
        for job, result in _compile_all(elsewhere, nvcc, num_jobs):
            entry = entries[job.name, job.arch]
            if isinstance(result, KernelHubError):
                wrong[job.file] = "does not build"
            elif result[0] != entry:
                wrong[job.file] = f"sha256 {entry.sha256} there, {result[0].sha256} here"
    by_lot = "" if one_in == 1 else f" (one in {one_in}, by lot: {LOT}={lot} draws the same)"
    if wrong:
        lines = "".join(f"\n  {out.name}/{file}: {why}" for file, why in sorted(wrong.items()))
        print(f"error: not reproducible{by_lot}:{lines}", file=sys.stderr)
        print("run ./build_cubins.sh and commit what it writes", file=sys.stderr)
        return 1
    print(f"{len(drawn)} cubins rebuilt elsewhere with nvcc {nvcc.version}: identical{by_lot}")
    if len(drawn) < len(jobs):
        print(f"{len(jobs)} cubins: of these sources, flags and toolkit, by the manifest's digests")
    return 0


def _one_in(number: int, jobs: list[Job], sizes: dict[str, int], lot: str) -> list[Job]:
    """By lot one of each `number` that are next to each other in size, and so in time, largest
    first: each draw takes about as long as the next."""
    by_size = sorted(jobs, key=lambda job: (-sizes.get(job.file, 0), job.file))
    draw = random.Random(lot)
    return [draw.choice(by_size[i : i + number]) for i in range(0, len(by_size), number)]


Result = tuple[CubinEntry, bytes] | KernelHubError


def _compile_all(jobs: list[Job], nvcc: Nvcc, num_jobs: int) -> Iterator[tuple[Job, Result]]:
    """Results as they come, a progress line for each; a failure does not stop the others."""
    num_done = 0
    with ThreadPoolExecutor(num_jobs) as pool:
        running = {pool.submit(_one, job, nvcc): job for job in jobs}
        for future in as_completed(running):
            job = running[future]
            num_done += 1
            result, messages, seconds = future.result()
            head = f"[{num_done:{len(str(len(jobs)))}}/{len(jobs)}] {job.arch} {job.name}"
            if isinstance(result, KernelHubError):
                print(f"{head}: FAILED", flush=True)
                print(f"error: {result}", file=sys.stderr, flush=True)
            else:
                entry, image = result
                kib, many = len(image) / 1024, len(entry.functions)
                counted = f"{many} function{'s' * (many != 1)}, {kib:.0f} KiB, {seconds:.1f} s"
                print(f"{head}: {counted}", flush=True)
                if messages:
                    print(messages, flush=True)
            yield job, result


def _one(job: Job, nvcc: Nvcc) -> tuple[Result, str, float]:
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="kernel_hub_") as scratch:
            compiled = compile_cubin(nvcc, job, Path(scratch))
            described = compile_described(nvcc, job, Path(scratch))
        result: Result = (_describe(job, nvcc, compiled, described), compiled.image)
        messages = compiled.messages
    except KernelHubError as error:
        result, messages = error, ""
    return result, messages, time.perf_counter() - started


def _describe(job: Job, nvcc: Nvcc, compiled: Compiled, described: bytes | None) -> CubinEntry:
    """The manifest's entry: the cubin's own figures, with names, types and launches as the source
    has them."""
    info = read_cubin(compiled.image)
    if not info.functions:
        raise KernelHubError(f'{job.label}: exports no kernel; write extern "C" __global__')
    mangled = [name for name in info.functions if name.startswith("_Z")]
    if mangled:
        raise KernelHubError(f'{job.label}: {", ".join(mangled)} lacks extern "C"')
    spilled = {n: f.local_bytes for n, f in info.functions.items() if f.local_bytes}
    if spilled and not job.local_memory_reason:
        shown = ", ".join(f"{name} ({size} bytes)" for name, size in sorted(spilled.items()))
        raise KernelHubError(
            f"{job.label}: registers spill to local memory, or an array is indexed at run time: "
            f"{shown}. Mend it, or say why: // kernel_hub: allow-local-memory: <reason>"
        )
    declared = read_prototypes(compiled.preprocessed, info.functions, job.label)
    in_ptx = read_ptx(compiled.ptx).functions
    launches = read_launch_facts(described, info.functions, job.label)
    functions = {}
    for name, f in info.functions.items():
        where = f"{job.label}: {name}"
        if name not in in_ptx:
            raise KernelHubError(f"{where} is in the cubin, but not in the PTX of the same build")
        params = match_params(declared[name], f.params, in_ptx[name], where)
        functions[name] = function_entry(f, params, launch=launches.get(name))
    return CubinEntry(
        name=job.name,
        arch=job.arch,
        file=job.file,
        sha256=hashlib.sha256(compiled.image).hexdigest(),
        size_bytes=len(compiled.image),
        source=job.place,
        source_sha256=job.source_sha256,
        toolkit=nvcc.version,
        target=job.target,
        flags=job.flags,
        os_abi=info.os_abi,
        abi_version=info.abi_version,
        minimum_driver=nvcc.minimum_driver,
        functions=functions,
    )


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
