"""A decode step as a table and as a picture: what takes how long, how near to the card's limits."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MissingPackageError
from . import console

if TYPE_CHECKING:
    from ...measure.steps.decode import DecodeStep


def check_ready(picture: str | None) -> None:
    """Raise MissingPackageError where there is nothing to draw it with."""
    if picture and importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError(
            "--report FILE.png needs matplotlib: pip install 'kernel_hub[bench]'"
        )


def show(step: DecodeStep) -> None:
    """Print it, what takes longest first."""
    console.heading(f"a decode step of {step.num_sequences} sequences")
    rows = []
    for kind in step.kinds:
        total = kind.count * kind.time_us
        share = "" if kind.share is None else f"{kind.share:.0%}"
        rate = f"{kind.num_bytes / kind.time_us / 1e6:.2f}"
        flops = f"{kind.num_flops / kind.time_us / 1e6:.1f}" if kind.num_flops else ""
        rows.append([
            kind.op, kind.shape, kind.count, f"{kind.time_us:.1f}", f"{total / step.ops_us:.0%}",
            rate, flops, share,
        ])  # fmt: skip
    columns = ["op", "shape", "calls", "us each", "of the ops", "TB/s", "TFLOP/s", "of its limit"]
    console.table(columns, rows, right=columns[2:], wraps=["shape"])
    said = (
        f"all ops {step.ops_us:.0f} us, each timed alone; the engine's step {step.wall_us:.0f} us"
    )
    if step.roofs is not None:
        matrix = step.roofs.matrix[step.dtype]
        said += f"; limits: copies {step.roofs.copy:.2f} TB/s, products {matrix:.0f} TFLOP/s"
    console.note(said)


def draw(step: DecodeStep, file: Path) -> None:
    """The step's ops in their order, and each kind's rate by its operations a byte."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (line, roof) = pyplot.subplots(
        2, figsize=(11, 8), gridspec_kw={"height_ratios": [1, 3]}, layout="constrained"
    )
    colours = [pyplot.get_cmap("tab20")(place % 20) for place in range(len(step.kinds))]
    start = 0.0
    for place in step.order:
        line.broken_barh([(start, step.kinds[place].time_us)], (0, 1), facecolors=colours[place])
        start += step.kinds[place].time_us
    line.set(yticks=[], xlabel="us", xlim=(0, start), title="the ops of a step, each timed alone")
    for kind, colour in zip(step.kinds, colours, strict=True):
        label = f"{kind.op} {kind.shape}"
        # Without products, bytes alone say how far it goes: an operation each.
        flops = kind.num_flops or kind.num_bytes
        rate = flops / kind.time_us / 1e6
        roof.plot(flops / kind.num_bytes, rate, "o", color=colour, label=label)
    if step.roofs is not None:
        copy, matrix = step.roofs.copy, step.roofs.matrix[step.dtype]
        edge = matrix / copy
        roof.plot([edge / 4096, edge, edge * 16], [matrix / 4096, matrix, matrix], color="black")
    roof.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    roof.legend(fontsize=8, loc="lower right")
    figure.suptitle(f"a decode step of {step.num_sequences} sequences", fontsize=11)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
