"""What became of each case, counted: geometric mean, worst, shares. Knows no torch.

A case counts where every peer that was asked for, and takes such a case, has run in its family.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kernel_hub.measure import results

OURS = "kernel_hub"
BEHIND = 1.05  # cases over this are printed


@dataclass(frozen=True)
class Outcome:
    """One case. Samples are microseconds a launch.

    train: contender -> samples of launches in a train of their own kernels; behind: each behind
    an ordinary kernel, whose own time is subtracted; {} where that was not asked.
    peers: contender -> the names of peers it stands for. refused: the same of those that did not
    run, and reasons: why.
    """

    family: str
    case: str
    variant: str = ""
    train: Mapping[str, Sequence[float]] = field(default_factory=dict)
    behind: Mapping[str, Sequence[float]] = field(default_factory=dict)
    peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    wrong: str = ""

    def medians(self, is_behind: bool = False) -> dict[str, float]:
        """By contender."""
        samples = self.behind if is_behind else self.train
        return {name: statistics.median(values) for name, values in samples.items()}

    def best_peer(self, is_behind: bool = False) -> str | None:
        """The quickest that is not ours."""
        peers = {name: us for name, us in self.medians(is_behind).items() if name != OURS}
        return min(peers, key=peers.__getitem__, default=None)

    def ratio(self, is_behind: bool = False) -> float | None:
        """Our time over that of the best peer; below 1 is ahead."""
        medians, best = self.medians(is_behind), self.best_peer(is_behind)
        return None if best is None or OURS not in medians else medians[OURS] / medians[best]


def never_ran(outcomes: Iterable[Outcome]) -> dict[str, set[str]]:
    """family -> names of peers that were asked for and ran in none of its cases."""
    ran: dict[str, set[str]] = {}
    asked: dict[str, set[str]] = {}
    for each in outcomes:
        for names in each.peers.values():
            ran.setdefault(each.family, set()).update(names)
        for names in each.refused.values():
            asked.setdefault(each.family, set()).update(names)
    return {family: names - ran.get(family, set()) for family, names in asked.items()}


def counts(outcome: Outcome, missing: Mapping[str, set[str]]) -> bool:
    """Whether a case counts; missing: as `never_ran` has it."""
    lacking = missing.get(outcome.family, set())
    return outcome.ratio() is not None and not any(
        lacking & set(names) for names in outcome.refused.values()
    )


@dataclass(frozen=True)
class Summary:
    """Ratios of our time to the best peer's."""

    num_cases: int
    geometric_mean: float
    worst: float
    over_110: float  # share of cases
    over_120: float

    def __str__(self) -> str:
        """One line."""
        return (
            f"geometric mean {self.geometric_mean:.3f}, worst {self.worst:.2f}, "
            f"{100 * self.over_110:.0f} % over 1.10, {100 * self.over_120:.0f} % over 1.20, "
            f"{self.num_cases} cases"
        )


def summary(ratios: Sequence[float]) -> Summary | None:
    """None where there is no ratio."""
    if not ratios:
        return None
    return Summary(
        len(ratios),
        statistics.geometric_mean(ratios),
        max(ratios),
        sum(ratio > 1.10 for ratio in ratios) / len(ratios),
        sum(ratio > 1.20 for ratio in ratios) / len(ratios),
    )


def rows(outcomes: Sequence[Outcome], prefix: str, suffix: str = "") -> list[results.ResultRow]:
    """Of every case, ours beside its peers; those that do not count in families that say so.

    prefix, suffix: of the families' names.
    """
    missing = never_ran(outcomes)
    made: list[results.ResultRow] = []
    for each in outcomes:
        verdict = "" if counts(each, missing) else ", not counted"
        for is_behind, samples in ((False, each.train), (True, each.behind)):
            if not samples:
                continue
            where = ", behind a kernel" if is_behind else ""
            family = f"{prefix} {each.family}{suffix}{where}{verdict}"
            best = each.best_peer(is_behind) or ""
            found = results.summarise(family, each.case, samples, "us", ratio_to=best)
            made += [
                replace(row, note=each.variant) if row.contender == OURS else row for row in found
            ]
    return made


def told(outcomes: Sequence[Outcome]) -> list[str]:
    """The summary as lines: each family, then its cases behind, and what does not count."""
    missing = never_ran(outcomes)
    lines: list[str] = []
    for family in dict.fromkeys(each.family for each in outcomes):
        here = [each for each in outcomes if each.family == family]
        lines += _told_of(family, here, missing)
    return lines


def _told_of(family: str, here: Sequence[Outcome], missing: Mapping[str, set[str]]) -> list[str]:
    counted = [each for each in here if counts(each, missing)]
    ratios = {each.case: ratio for each in counted if (ratio := each.ratio()) is not None}
    lines = [f"{family}: {summary(list(ratios.values())) or 'no case counts'}"]
    behind = [ratio for each in counted if (ratio := each.ratio(True)) is not None]
    if found := summary(behind):
        lines.append(f"  behind an ordinary kernel: {found}")
        lines.append(f"  which costs, median: {_costs(counted)}")
    if len(counted) < len(here):
        names = ", ".join(sorted(missing.get(family, ()))) or "no peer"
        lines.append(f"  {len(here) - len(counted)} cases do not count: {names} never ran")
    lines += [f"  {line}" for line in _refusals(here)]
    for each in sorted(counted, key=lambda one: -ratios[one.case]):
        if ratios[each.case] > BEHIND:
            medians = sorted(each.medians().items(), key=lambda item: item[1])
            times = ", ".join(f"{name} {us:.2f}" for name, us in medians)
            lines.append(f"  {ratios[each.case]:.2f}  {each.case}  [{each.variant}]  us: {times}")
    return lines


def _costs(outcomes: Sequence[Outcome]) -> str:
    """Microseconds that a launch behind a kernel takes more than one in a train."""
    more: dict[str, list[float]] = {}
    for each in outcomes:
        train, behind = each.medians(), each.medians(True)
        for name in behind:
            more.setdefault(name, []).append(behind[name] - train[name])
    return ", ".join(f"{name} {statistics.median(x):+.2f} us" for name, x in more.items())


def _refusals(outcomes: Sequence[Outcome]) -> list[str]:
    """Each contender that did not run somewhere, how often, and the first reason."""
    found: dict[str, list[str]] = {}
    for each in outcomes:
        for name, reason in each.reasons.items():
            found.setdefault(name, []).append(f"{each.case}: {reason}")
    return [f"{name} left out in {len(x)}, first {x[0]}" for name, x in found.items()]
