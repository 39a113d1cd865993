"""linear over every number of rows there is up to 1024, for three weights: what is measured, and
what is found. Knows no torch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from .outcome import Outcome, Summary, summary
from .shapes import Lot

WEIGHTS = ((6144, 4096), (4096, 14336), (1280, 8192))  # (n, k)
MOST, EACH_UP_TO, STEP, DRAWN = 1024, 64, 32, 48
JUMP = 1.15  # of the time from one m to the next


def sizes(seed: int, every: bool = False) -> list[int]:
    """Every m up to 64, those around multiples of 32, and some drawn with the one after each."""
    if every:
        return list(range(1, MOST + 1))
    found = set(range(1, EACH_UP_TO + 1))
    found.update(x + near for x in range(STEP, MOST + 1, STEP) for near in (-1, 0, 1))
    for x in random.Random(seed).sample(range(EACH_UP_TO, MOST), DRAWN):
        found.update((x, x + 1))
    return sorted(x for x in found if x <= MOST)


def lots(seed: int, every: bool = False, count: int = 0) -> list[Lot]:
    """The cases; with a count of so many of the sizes, drawn."""
    found = sizes(seed, every)
    if count:
        found = sorted(random.Random(f"{seed} sweep").sample(found, min(count, len(found))))
    return [Lot("linear", 0, "", m, n, k) for n, k in WEIGHTS for m in found]


def jumps(ours: Mapping[int, float], peer: Mapping[int, float]) -> list[tuple[int, float, float]]:
    """(m, ours, the peer's) where time grows by over 15 % from m - 1 to m and the peer's less."""
    found = []
    for m in sorted(ours):
        if m - 1 in ours and m in peer and m - 1 in peer:
            rise, other = ours[m] / ours[m - 1], peer[m] / peer[m - 1]
            if rise > JUMP and other <= JUMP:
                found.append((m, rise, other))
    return found


def told(found: Sequence[tuple[Lot, Outcome]]) -> list[str]:
    """A line a weight, its worst sizes and its jumps."""
    lines = []
    for n, k in WEIGHTS:
        here = {lot.m: each for lot, each in found if (lot.n, lot.k) == (n, k)}
        ratios = {m: ratio for m, each in here.items() if (ratio := each.ratio()) is not None}
        total: Summary | None = summary(list(ratios.values()))
        lines.append(f"{n}x{k}: {total or 'nothing measured'}")
        worst = sorted(ratios, key=lambda m: -ratios[m])[:8]
        lines.append("  worst: " + ", ".join(f"m {m} {ratios[m]:.2f}" for m in worst))
        medians = {m: here[m].medians() for m in ratios}
        best = {m: medians[m][here[m].best_peer() or ""] for m in ratios}
        ours = {m: medians[m]["kernel_hub"] for m in ratios}
        for m, rise, other in jumps(ours, best):
            lines.append(f"  jumps at m {m}: x {rise:.2f}, the peer x {other:.2f}")
    return lines
