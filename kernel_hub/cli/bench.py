"""`kernel-hub bench`: launches, or one op, beside the peers that are installed."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import driver
from ..errors import KernelHubError
from .parts import console

if TYPE_CHECKING:
    from ..measure.results import ResultRow

NAME = "bench"
HELP = "measure launches, or an op, beside the peers at hand (needs a GPU and torch)"
EXAMPLE = "kernel-hub bench rms_norm --shape tokens=300,hidden=5120 --against torch,compile"
_STEPS = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", metavar="OP", help="an op; none: what a launch costs")
    parser.add_argument("--shape", default="", metavar="NAME=SIZE,…", help="the op's sizes")
    parser.add_argument(
        "--dtype", default="bf16", choices=("fp16", "bf16", "fp32"), help="of OP (default bf16)"
    )
    parser.add_argument(
        "--against", metavar="PEER,…", help="torch, compile, cudnn, … (default: all that OP has)"
    )
    parser.add_argument("--rounds", type=int, help="default 60 of launches, 30 of an op")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows with versions")


def check_ready(args: argparse.Namespace) -> None:
    """Raise KernelHubError for what is missing or wrong, before minutes are spent."""
    has_torch = importlib.util.find_spec("torch") is not None
    if args.op and has_torch:
        from ..measure import beside

        beside.sizes_of(args.op, args.shape)
        beside.peers_of(args.op, args.against)
    driver.get().primary_context(0)
    if not has_torch:
        raise KernelHubError("the benchmarks need torch with CUDA: pip install torch")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise KernelHubError("--plot needs matplotlib: pip install matplotlib")


def measure_op(args: argparse.Namespace) -> list[ResultRow]:
    """Rows of one op and its peers."""
    from ..measure import beside
    from ..measure.timing import GraphTimer

    sizes = beside.sizes_of(args.op, args.shape)
    peers = beside.peers_of(args.op, args.against)
    timer = GraphTimer(args.rounds or 30)
    with console.progress(len(peers) + 2, args.op) as advance:

        def timed(*given: Any) -> Any:
            advance("timing")
            return timer.measure(*given)

        return beside.measure(args.op, sizes, args.dtype, peers, timed, _teller(advance))


def _teller(advance: Callable[[str], None]) -> Callable[[str], None]:
    """Steps forward, but for what could not be measured: that is a line of its own."""

    def tell(text: str) -> None:
        if text.startswith("without "):
            console.note(text)
        else:
            advance(text)

    return tell


def measure_launches(rounds: int) -> list[ResultRow]:
    """All rows; what could not be measured is said on the way."""
    from ..measure import launch

    with console.progress(_STEPS, "launch costs") as advance:
        rows = launch.run(rounds, _teller(advance))
        advance("import and first launch")
        return rows + launch.import_milliseconds()


def bars(rows: list[ResultRow], unit: str) -> dict[str, dict[str, float]]:
    """case -> contender -> median, quickest first, of the rows in `unit`."""
    found: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row.median):
        if row.unit == unit:
            found.setdefault(row.case, {})[row.contender] = row.median
    return found


def draw(rows: list[ResultRow], file: Path, title: str) -> None:
    """One panel of horizontal bars a case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    unit = rows[0].unit
    panels = bars(rows, unit)
    heights = [len(contenders) + 1 for contenders in panels.values()]
    figure, grid = pyplot.subplots(
        len(panels),
        figsize=(9, 0.35 * sum(heights) + 1),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for (case, contenders), axes in zip(panels.items(), grid[:, 0], strict=True):
        names = list(contenders)
        colors = ["tab:green" if name.startswith("kernel_hub") else "tab:gray" for name in names]
        drawn = axes.barh(names, list(contenders.values()), color=colors)
        axes.bar_label(drawn, fmt="%.4g", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(case, loc="left", fontsize=10)
    grid[-1, 0].set_xlabel(f"{unit} a call, median")
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> int:
    check_ready(args)
    from ..measure import results

    rows = measure_op(args) if args.op else measure_launches(args.rounds or 60)
    columns = ["case", "contender", "median", "p20", "p80", "unit", "ratio"]
    columns += ["note"] * any(row.note for row in rows)
    console.table(
        columns,
        [_cells(row)[: len(columns)] for row in rows],
        right=["median", "p20", "p80"],
        wraps=["case", "contender", "ratio", "note"],
    )
    if args.json:
        results.write(args.json, rows)
        console.note(f"wrote {args.json}")
    if args.plot:
        about = results.environment()
        draw(rows, args.plot, f"{args.op or 'launch costs'}, {about['gpu']}, {about['driver']}")
        console.note(f"wrote {args.plot}")
    return (
        1
        if any(row.note.startswith("WRONG") and row.contender == "kernel_hub" for row in rows)
        else 0
    )


def _cells(row: ResultRow) -> list[Any]:
    numbers = [f"{value:.4g}" for value in (row.median, row.p20, row.p80)]
    ratio = f"{row.ratio:.2f} x {row.ratio_to}" if row.ratio is not None else ""
    return [row.case, row.contender, *numbers, row.unit, ratio, row.note]
