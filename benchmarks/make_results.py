"""benchmarks/results/*.json, *.json.xz -> RESULTS.md, READMEs' tables (between marks), pictures.

python benchmarks/make_results.py           writes all
python benchmarks/make_results.py --check   fails where they are out of date
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import picture
import plot_sweep

from kernel_hub.measure import results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
OURS = "kernel_hub"
# Of what is possible, and other measures of the same engine: not peers.
FLOORS = (
    "C loop", "copy", "cuBLAS, product alone", "floor", "in step", "in step, idle",
    "prompts alone + decode steps", "a decode step",
)  # fmt: skip
DRAWN, UNCOUNTED = ("by lot ", "sweep "), ", not counted"  # of families' names
# Rows of their own, and ours beside itself: no line among those beside peers.
APART = ("launch", "start", "by lot backward_deterministic")
# Fixed families whose cases drawn by lot have another name, or several.
DRAWN_OF = {"attention": "prefill", "attention_backward": "backward", "decode": "decode_contiguous"}
BEHIND = 1.05  # of cases drawn by lot, those over this are listed
_MOST = (1.10, 1.20)
QUICK_UNITS = {"ns", "us", "ms", "s"}  # smaller is better; in every other unit larger is
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One case of a family: contender -> row, in the order measured."""

    name: str
    rows: dict[str, Row]

    @property
    def unit(self) -> str:
        return str(next(iter(self.rows.values()))["unit"])

    @property
    def ours(self) -> str | None:
        """The contender that stands for kernel_hub: its plain name, else the first of its kind."""
        kin = [name for name in self.rows if name.startswith(OURS)]
        return OURS if OURS in kin else (kin[0] if kin else None)

    @property
    def best_peer(self) -> str | None:
        """The quickest contender that is neither ours nor a floor."""
        peers = [n for n in self.rows if not n.startswith(OURS) and n not in FLOORS]
        return min(peers, key=self.cost, default=None)

    def cost(self, contender: str) -> float:
        """Smaller is better, whatever the unit."""
        median = float(self.rows[contender]["median"])
        return median if self.unit in QUICK_UNITS else 1 / median

    def ratio(self) -> float | None:
        """Our time over that of the best peer; below 1 is ahead."""
        if self.ours is None or self.best_peer is None:
            return None
        return self.cost(self.ours) / self.cost(self.best_peer)

    @property
    def is_lost(self) -> bool:
        ratio = self.ratio()
        return ratio is not None and ratio > 1


class Family(NamedTuple):
    """One family of one results file, with where and how it was measured."""

    name: str
    gpu: str
    driver: str
    versions: dict[str, str]
    command: str
    cases: tuple[Case, ...]
    file: str = ""  # without its suffix

    @property
    def is_drawn(self) -> bool:
        """Whether its cases were drawn by lot: they are summed up, not listed."""
        return self.name.startswith(DRAWN)

    @property
    def title(self) -> str:
        """Its name; of those drawn by lot, which are in several files, the seed too."""
        _, is_seed, seed = self.file.rpartition("_s")
        return f"{self.name}, seed {seed}" if is_seed and self.is_drawn else self.name

    @property
    def ratios(self) -> list[float]:
        """Of the cases that have one."""
        return [ratio for case in self.cases if (ratio := case.ratio()) is not None]


def load(folder: Path) -> list[Family]:
    """Every family of every file, in the order of the files."""
    families: dict[tuple[str, str], dict[str, dict[str, Row]]] = {}
    about: dict[tuple[str, str], Row] = {}
    for file in sorted([*folder.glob("*.json"), *folder.glob("*.json.xz")]):
        for row in results.read(file):
            key = (file.name.partition(".")[0], row["family"])
            about.setdefault(key, row)
            families.setdefault(key, {}).setdefault(row["case"], {})[row["contender"]] = row
    return [
        Family(
            name,
            about[file, name]["gpu"],
            about[file, name]["driver"],
            about[file, name]["versions"],
            about[file, name]["command"],
            tuple(Case(case, rows) for case, rows in cases.items()),
            file,
        )
        for (file, name), cases in families.items()
    ]


def number(value: float) -> str:
    """Four significant digits, thousands separated."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def family_table(family: Family) -> list[str]:
    """A case a row, a contender a column: medians, and our ratio to the best peer."""
    contenders = list(dict.fromkeys(name for case in family.cases for name in case.rows))
    has_ratio = any(case.ratio() is not None for case in family.cases)
    head = ["case", "unit", *contenders] + (["ratio"] if has_ratio else [])
    lines = [line(head), line(["---", "---"] + ["---:"] * (len(head) - 2))]
    for case in family.cases:
        cells = [case.name, case.unit]
        for name in contenders:
            cells.append(number(case.rows[name]["median"]) if name in case.rows else "")
        if has_ratio:
            ratio = case.ratio()
            cells.append("" if ratio is None else f"{ratio:.2f}")
        lines.append(line(cells))
    return lines


def lost(families: Iterable[Family]) -> list[str]:
    """One line for each case in which a peer is ahead; of those drawn by lot, in their places."""
    return [
        f"- {family.name}, {case.name}: {number(case.rows[case.ours]['median'])} {case.unit} "
        f"against {number(case.rows[case.best_peer]['median'])} of {case.best_peer} "
        f"({case.ratio():.2f})"
        for family in families
        for case in family.cases
        if not family.is_drawn and case.is_lost and case.ours and case.best_peer
    ]


def sums(ratios: Sequence[float]) -> str:
    """Geometric mean, worst and shares of ratios."""
    mean = statistics.geometric_mean(ratios)
    shares = [
        f"{sum(x > most for x in ratios) / len(ratios):.0%} over {most:.2f}" for most in _MOST
    ]
    return f"geometric mean {mean:.2f}, worst {max(ratios):.2f}, {', '.join(shares)}"


def drawn_lines(family: Family) -> list[str]:
    """The sums of a family drawn by lot, and its cases behind, worst first."""
    ratios = family.ratios
    lines = [f"{len(ratios)} cases: {sums(ratios)}." if ratios else "No case counts."]
    if family.name.startswith("sweep "):
        return [*lines, "", f"![Time over the number of rows](results/{family.file}.svg)"]
    behind = [case for case in family.cases if (case.ratio() or 0) > BEHIND]
    for case in sorted(behind, key=lambda case: -(case.ratio() or 0)):
        note = case.rows[case.ours or ""].get("note", "")
        lines.append(
            f"- {case.ratio():.2f} {case.name}: {number(case.rows[case.ours or '']['median'])} "
            f"{case.unit}{f' ({note})' if note else ''} against "
            f"{number(case.rows[case.best_peer or '']['median'])} of {case.best_peer}"
        )
    return [lines[0], "", *lines[1:]] if behind else lines


def document(families: list[Family]) -> str:
    """RESULTS.md."""
    lines = [
        "# Results",
        "",
        "Written by `python benchmarks/make_results.py` from `benchmarks/results/*.json` and",
        "`*.json.xz`; do not edit. Medians; `ratio` is kernel_hub's time over the best peer's in",
        "the same run, so below 1 is ahead. `C loop` and `copy` are floors, not peers.",
        "",
    ]
    for family in families:
        versions = ", ".join(f"{name} {version}" for name, version in family.versions.items())
        body = drawn_lines(family) if family.is_drawn else family_table(family)
        lines += [f"## {family.title}", "", *body, ""]
        lines += [f"{family.gpu}, driver {family.driver}; {versions}.", ""]
        lines += [f"Reproduce: `{family.command}`", ""]
    behind = lost(families)
    lines += ["## Where a peer is ahead", "", *(behind or ["Nowhere in these runs."]), ""]
    if not families:
        lines = [*lines[:6], "Nothing has been measured yet.", ""]
    return "\n".join(lines)


def summary(families: list[Family]) -> str:
    """README's tables: a line for each family of kernels; launches and starts one by one."""
    if not families:
        return "Not measured yet: `make bench` on a GPU."
    cases = [
        summary_cells(case)
        for family in families
        if family.name in ("launch", "start")
        for case in family.cases
        if case.ours
    ]
    kernels = [
        ratios_line(name, found.cases, found.ratios)
        for name, found in ratios_of_families(families).items()
    ]
    lines = []
    if kernels:
        heads = ["kernels", "cases", "geometric mean", "worst", f"over {_MOST[0]:.2f}"]
        lines += [line(heads), line(["---"] * len(heads)), *kernels, ""]
    for heads, rows in (
        (["launching", "kernel_hub", "best peer", "ratio"], [row for row in cases if row[2]]),
        (["starting", "kernel_hub"], [row[:2] for row in cases if not row[2]]),
    ):
        if rows:
            lines += [line(heads), line(["---"] * len(heads)), *map(line, rows), ""]
    measured = dict.fromkeys(f"{family.gpu}, driver {family.driver}" for family in families)
    note = "Ratio: our time over the best peer's, below 1 is ahead. All rows, versions and commands"
    last = f"Measured on {'; '.join(measured)}. {note}: [RESULTS.md](benchmarks/RESULTS.md)."
    return "\n".join([*lines, last])


def ratios_line(name: str, cases: str, ratios: Sequence[float]) -> str:
    """Geometric mean and worst of a family's ratios, and the share that is behind."""
    over = sum(ratio > _MOST[0] for ratio in ratios) / len(ratios)
    mean = statistics.geometric_mean(ratios)
    return line([name, cases, f"{mean:.2f}", f"{max(ratios):.2f}", f"{over:.0%}"])


class Found(NamedTuple):
    """The ratios of a family, and how many cases they are of, in words."""

    ratios: list[float]
    cases: str


def ratios_of_families(families: Iterable[Family]) -> dict[str, Found]:
    """Those drawn by lot, over all their seeds, instead of the fixed cases of the same op.

    Cases that do not count (a peer that was asked for did not run) are only told; APART are left
    out.
    """
    fixed: dict[str, Found] = {}
    drawn: dict[str, list[list[float]]] = {}
    uncounted: dict[str, int] = {}
    for family in families:
        if not family.ratios or family.name in APART:
            continue
        name = family.name.removeprefix(DRAWN[0])
        if not family.is_drawn:
            fixed[name] = Found(family.ratios, f"{len(family.ratios)}")
        elif name.endswith(UNCOUNTED):
            name = name.removesuffix(UNCOUNTED)
            uncounted[name] = uncounted.get(name, 0) + len(family.cases)
        elif family.name.startswith(DRAWN[0]):
            drawn.setdefault(name, []).append(family.ratios)
    by_lot = {}
    for name, seeds in drawn.items():
        ratios = [ratio for seed in seeds for ratio in seed]
        total = len(ratios) + uncounted.get(name, 0)
        of = f"{len(ratios)}" if total == len(ratios) else f"{len(ratios)} of {total}"
        runs = f"{of}, by lot, {len(seeds)} seed{'s' * (len(seeds) > 1)}"
        by_lot[name] = Found(ratios, runs)
    rest = {name: x for name, x in fixed.items() if DRAWN_OF.get(name, name) not in by_lot}
    return {**by_lot, **rest}


def summary_cells(case: Case) -> list[str]:
    """One case: ours (with the bound launch and the floor beside it), the best peer, the ratio; ''
    where it has none."""
    assert case.ours is not None
    ours = f"{number(case.rows[case.ours]['median'])} {case.unit}"
    beside = [
        f"{label} {number(case.rows[name]['median'])}"
        for name, label in ((f"{OURS} bound", "bound"), ("C loop", "C floor"))
        if name in case.rows
    ]
    peer = case.best_peer
    other = f"{number(case.rows[peer]['median'])} ({peer})" if peer else ""
    ratio = case.ratio()
    return [
        case.name,
        ours + (f" ({', '.join(beside)})" if beside else ""),
        other,
        "" if ratio is None else f"{ratio:.2f}",
    ]


def replaced(readme: str, table: str) -> str:
    """README with `table` between the markers. Raises ValueError where they are missing."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md needs one line {BEGIN} and one {END}")
    head, _, rest = readme.partition(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def main(argv: list[str] | None = None) -> int:
    """Write, or with --check compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    args = parser.parse_args(argv)
    families = load(RESULTS)
    readmes = ROOT / "README.md", ROOT / "README.zh-CN.md"
    gpu = families[0].gpu if families else ""
    ratios = {name: found.ratios for name, found in ratios_of_families(families).items()}
    texts = {
        ROOT / "benchmarks/RESULTS.md": document(families),
        RESULTS / "families.svg": picture.svg(ratios, f"kernel_hub beside the best peer, {gpu}"),
        **{
            file.with_suffix(".svg"): plot_sweep.picture_of(results.read(file))
            for file in sorted(RESULTS.glob("*_sweep_*.json"))
        },
        **{
            readme: replaced(readme.read_text(encoding="utf-8"), summary(families))
            for readme in readmes
        },
    }
    stale = [f for f, text in texts.items() if not f.exists() or f.read_text("utf-8") != text]
    for file in stale:
        if not args.check:
            file.write_text(text := texts[file], encoding="utf-8")
            print(f"wrote {file.relative_to(ROOT)} ({len(text.splitlines())} lines)")
    if args.check and stale:
        print(f"out of date: {', '.join(f.name for f in stale)}; run make_results.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
