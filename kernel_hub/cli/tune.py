"""`kernel-hub tune`: measure an op's variants on this GPU and keep the fastest for the user."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import driver, tuning
from ..collection.resolve import parse_target
from ..errors import KernelHubError, TableError
from ..tuning import file
from .parts import console

if TYPE_CHECKING:
    from ..measure.tune import Measured, Tunable

NAME = "tune"
HELP = "measure the variants of an op on this GPU and keep the fastest (needs a GPU and torch)"
EXAMPLE = "kernel-hub tune linear --shapes 8B-qkv,4096x11008 --sizes 1,16,256"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", help="only this op (default: all that have variants)")
    parser.add_argument(
        "--shapes", metavar="A,B", help="names (8B-qkv) or sizes in the order of the op's key "
        "(linear: 6144x4096 is n x k); default: Llama 8B and 70B",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", "--m", metavar="N,N", help="rows (the size a choice says 'up to')"
    )
    parser.add_argument("--dtype", help="default: the op's first")
    parser.add_argument("--rounds", type=int, default=5, help="samples a candidate (default 5)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be measured")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there, for one op")
    parser.add_argument("--list", action="store_true", help="show what the user's files hold")
    parser.add_argument("--clear", action="store_true", help="remove the user's files")


def run(args: argparse.Namespace) -> int:
    if args.list:
        return show(args.op)
    if args.clear:
        return clear(args.op)
    if importlib.util.find_spec("torch") is None:
        raise KernelHubError("tuning needs torch with CUDA: pip install torch")
    from ..measure import tune

    tunables = chosen(args.op)
    if args.output and len(tunables) > 1:
        raise KernelHubError("--output takes the file of one op: kernel-hub tune OP --output FILE")
    driver.get().primary_context(0)
    gpu = tune.current_gpu()
    for op, tunable in tunables.items():
        path = args.output or tunable.table.user_file(gpu)
        if path is None:
            raise KernelHubError("there is no home to write to: set XDG_CACHE_HOME, or --output")
        cases = list(problems(tunable, args.shapes, args.sizes))
        dtype = args.dtype or tunable.dtypes[0]
        if dtype not in tunable.dtypes:
            raise KernelHubError(f"--dtype {dtype}: {op} takes {', '.join(tunable.dtypes)}")
        if args.dry_run:
            _plan(tunable, gpu, cases, path)
        else:
            _tune(tunable, gpu, cases, path, dtype, args.rounds)
    return 0


def chosen(op: str | None) -> dict[str, Tunable]:
    """All that can be tuned, or `op` alone."""
    from ..measure.tune_ops import TUNABLE

    if op is None:
        return TUNABLE
    if op not in TUNABLE:
        raise KernelHubError(f"{op} has no variants to choose from; these have: {_names(TUNABLE)}")
    return {op: TUNABLE[op]}


def _names(names: Any) -> str:
    return ", ".join(sorted(names))


def problems(
    tunable: Tunable, shapes: str | None, sizes: str | None
) -> Iterator[tuple[str, dict[str, int | str], int]]:
    """(shape's name, key, size) of each problem asked for."""
    named = {name: dict(key) for name, key in tunable.shapes.items()}
    if shapes is not None:
        named = {name: _shape(tunable, name) for name in shapes.split(",")}
    asked = tunable.sizes
    if sizes is not None:
        if not all(part.isdecimal() and int(part) for part in sizes.split(",")):
            raise KernelHubError(f"--sizes takes numbers from 1 up, such as 1,16,256: {sizes!r}")
        asked = sorted({int(part) for part in sizes.split(",")})
    for (name, key), size in itertools.product(named.items(), asked):
        yield name, key, size


def _shape(tunable: Tunable, text: str) -> dict[str, int | str]:
    if text in tunable.shapes:
        return dict(tunable.shapes[text])
    names, parts = tunable.table.layout.key, text.split("x")
    if len(parts) != len(names) or not all(parts):
        raise KernelHubError(
            f"--shapes {text}: neither a name ({_names(tunable.shapes)}) nor sizes like "
            + "x".join(names)
        )
    return {n: int(p) if p.isdecimal() else p for n, p in zip(names, parts, strict=True)}


def _plan(
    tunable: Tunable, gpu: tuning.Gpu, cases: Sequence[tuple[str, Any, int]], path: Path
) -> None:
    table = tunable.table
    rows = []
    for name, key, size in cases:
        candidates = list(tunable.candidates(gpu, size, key))
        rows.append([table.op, name, table.layout.text(key), size, len(candidates)])
    columns = ["op", "shape", "key", table.layout.bucket, "candidates"]
    numbers = [table.layout.bucket, "candidates"]
    console.table(columns, rows, right=numbers, once=["op"], wraps=["key"])
    console.note(f"nothing was measured; the result would be written to {path}")


def _tune(
    tunable: Tunable,
    gpu: tuning.Gpu,
    cases: Sequence[tuple[str, Any, int]],
    path: Path,
    dtype: str,
    rounds: int,
) -> None:
    """Measure, and write after each shape: an interrupted run keeps what it has."""
    from ..measure import tune

    table = tunable.table
    old = _old_sections(table, path, gpu)
    try:
        tuning.write(path, file.text_of(old, table.layout))  # fails before the work
    except TableError as error:
        hint = "--output FILE writes elsewhere, and so does XDG_CACHE_HOME"
        raise TableError(f"{error}; {hint}") from error
    outcomes: list[Measured] = []
    rows = []
    with table.shipped_only(), console.progress(len(cases), f"tuning {table.op}") as advance:
        for _, group in itertools.groupby(cases, key=lambda case: case[0]):
            for name, key, size in group:
                advance(f"{name} {table.layout.bucket} {size}")
                try:
                    found = tune.measure(tunable, gpu, size, key, dtype, rounds=rounds)
                except KernelHubError:
                    raise
                except RuntimeError as error:  # torch's; the GPU may be of no more use
                    first = str(error).splitlines()[0]
                    raise KernelHubError(f"{table.op} {name} {size}: {first}") from error
                outcomes.append(found)
                rows.append(_cells(table.op, name, found))
            new = tune.section(table, gpu, outcomes)
            others = [s for s in old if not _same_gpu(s, gpu)]
            own = next((s for s in old if _same_gpu(s, gpu)), None)
            text = file.text_of([*others, file.merged(own, new)], table.layout)
            tuning.write(path, text)
    columns = ["op", "shape", table.layout.bucket, "choice", "us", "default us", "gain"]
    numbers = [table.layout.bucket, "us", "default us", "gain"]
    console.table(columns, rows, right=numbers, once=["op"], wraps=["choice"])
    wrong = {
        f"{o.key} {o.size}: {name}: {why}" for o in outcomes for name, why in o.refused.items()
    }
    for line in sorted(wrong):
        console.note(f"not taken: {line}")
    console.note(f"wrote {path}")
    if not tuning.is_enabled():
        console.note(f"{tuning.VARIABLE}=0 is set: no process with it reads that file")


def _old_sections(table: tuning.Table, path: Path, gpu: tuning.Gpu) -> list[tuning.GpuSection]:
    """What `path` holds and is worth keeping: nothing of a wrong file, no stale choices."""
    try:
        sections = table.sections_of(path)
    except TableError as error:
        console.note(f"starting anew: {error}")
        return []
    now = table.hashes(gpu)
    kept = []
    for section in sections:
        if section.cubins and _same_gpu(section, gpu) and dict(section.cubins) != now:
            console.note(f"starting anew: {path} is of other cubins")
            section = dataclasses.replace(section, cubins=now, choices={})
        kept.append(section)
    return kept


def _same_gpu(section: tuning.GpuSection, gpu: tuning.Gpu) -> bool:
    return (section.arch, section.gpu, section.num_sms) == (gpu.arch, gpu.name, gpu.num_sms)


def _cells(op: str, name: str, found: Measured) -> list[str]:
    choice = str(found.best) if found.best is not None else "the default"
    gain = f"{found.default_us / found.best_us - 1:+.1%}"
    times = [f"{found.best_us:.2f}", f"{found.default_us:.2f}"]
    return [op, name, str(found.size), choice, *times, gain]


def _files(op: str | None) -> list[Path]:
    folder = tuning.user_folder()
    return sorted(folder.glob(f"*/{op or '*'}.json")) if folder else []


def show(op: str | None) -> int:
    """Print the user's files; 1 where one is of no use."""
    files = _files(op)
    rows, problems = [], []
    for path in files:
        try:
            rows += _listed(path)
        except TableError as error:
            problems.append(str(error))
    if rows:
        console.table(
            ["op", "GPU", "key", "up to", "choice"], rows,
            right=["up to"], once=["op", "GPU"], wraps=["GPU", "key", "choice"],
        )  # fmt: skip
    for text in problems:
        console.note(f"not used: {text}")
    where = tuning.user_folder() or "no home, no folder"
    off = "" if tuning.is_enabled() else f"; {tuning.VARIABLE}=0 turns them off"
    console.note(f"{console.count(len(files), 'file')} in {where}{off}")
    return 1 if problems else 0


def _listed(path: Path) -> list[list[object]]:
    if importlib.util.find_spec("torch") is None:
        raise TableError(f"{path}: its op needs torch (pip install torch)")
    from ..measure import tune_ops

    if path.stem not in tune_ops.TUNABLE:
        raise TableError(f"{path}: no op of that name has variants to choose from")
    table = tune_ops.TUNABLE[path.stem].table
    rows: list[list[object]] = []
    for section in table.sections_of(path):
        capability = parse_target(section.arch)[:2]
        table.read_user_file(path, tuning.Gpu(capability, section.num_sms, section.gpu))
        for key, choices in section.choices.items():
            rows += [[table.op, section.gpu, key, c.most, str(c.row)] for c in choices]
    return rows


def clear(op: str | None) -> int:
    """Remove the user's files."""
    files = _files(op)
    folder = tuning.user_folder()
    try:
        for path in files:
            path.unlink()
        if op is None and folder is not None and folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        raise KernelHubError(f"cannot remove {error.filename}: {error.strerror}") from error
    console.note(f"{console.count(len(files), 'file')} removed from {folder}")
    return 0
