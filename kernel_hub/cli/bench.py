"""`kernel-hub bench`: what a launch costs, beside a C loop and the launchers that are installed."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import driver
from ..errors import KernelHubError
from . import _console

if TYPE_CHECKING:
    from ..measure.results import ResultRow

NAME = "bench"
HELP = "measure what a launch costs beside a C loop and other launchers (needs a GPU and torch)"
EXAMPLE = "kernel-hub bench --rounds 60 --plot launches.png --json launches.json"
_STEPS = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=60, help="of 300 launches each (default 60)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows with versions")


def check_ready(*, plot: bool) -> None:
    """Raise KernelHubError for what is missing, before minutes are spent."""
    driver.get().primary_context(0)
    if importlib.util.find_spec("torch") is None:
        raise KernelHubError("the launch benchmark needs torch with CUDA: pip install torch")
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise KernelHubError("--plot needs matplotlib: pip install matplotlib")


def measure(rounds: int) -> list[ResultRow]:
    """All rows; what could not be measured is said on the way."""
    from ..measure import launch

    with _console.progress(_STEPS, "launch costs") as advance:

        def tell(text: str) -> None:
            if text.startswith("without "):
                _console.note(text)
            else:
                advance(text)

        rows = launch.run(rounds, tell)
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

    panels = bars(rows, "ns")
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
        axes.bar_label(drawn, fmt="%.0f", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(case, loc="left", fontsize=10)
    grid[-1, 0].set_xlabel("nanoseconds a call, median")
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> int:
    check_ready(plot=args.plot is not None)
    from ..measure import results

    rows = measure(args.rounds)
    _console.table(
        ["case", "contender", "median", "p20", "p80", "unit", "ratio"],
        [_cells(row) for row in rows],
        right=["median", "p20", "p80"],
        wraps=["case", "contender", "ratio"],
    )
    if args.json:
        results.write(args.json, rows)
        _console.note(f"wrote {args.json}")
    if args.plot:
        about = results.environment()
        draw(rows, args.plot, f"launch costs, {about['gpu']}, driver {about['driver']}")
        _console.note(f"wrote {args.plot}")
    return 0


def _cells(row: ResultRow) -> list[Any]:
    numbers = [f"{value:.4g}" for value in (row.median, row.p20, row.p80)]
    ratio = f"{row.ratio:.2f} x {row.ratio_to}" if row.ratio is not None else ""
    return [row.case, row.contender, *numbers, row.unit, ratio]
