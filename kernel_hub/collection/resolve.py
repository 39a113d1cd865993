"""Which cubin runs on a GPU: a pure function of compute capability and candidates."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ..errors import CubinNotFoundError

if TYPE_CHECKING:
    from .entries import CubinEntry

_TARGET = re.compile(r"sm_?(\d+)(\d)([af]?)")


class Candidate(NamedTuple):
    """One cubin on offer. `target` is what it was built for: 'sm_80', 'sm_90a'."""

    arch: str
    target: str


class Resolution(NamedTuple):
    """The chosen candidate, or None, and for every other one the reason it fell."""

    chosen: Candidate | None
    rejected: dict[str, str]


@lru_cache(maxsize=64)
def parse_target(target: str) -> tuple[int, int, str]:
    """'sm_90a' -> (9, 0, 'a')."""
    match = _TARGET.fullmatch(target)
    if match is None:
        raise ValueError(f"{target!r} is no target: sm_80, sm_89, sm_90a are")
    return int(match[1]), int(match[2]), match[3]


def names_target(asked: str, target: str) -> bool:
    """Whether the token `asked` names `target`: 'sm90' and 'sm90a' are names of 'sm_90a'."""
    plain = target.replace("_", "")
    return asked in (plain, plain.rstrip("af"))


def refusal(compute_capability: tuple[int, int], target: str) -> str | None:
    """Why machine code for `target` cannot run on the GPU; None if it can.

    SASS, and that of 'f' targets, runs within its major version on the same or a later minor one;
    that of 'a' targets only on exactly theirs.
    """
    major, minor = compute_capability
    built_major, built_minor, suffix = parse_target(target)
    gpu = f"{major}.{minor}"
    if suffix == "a" and (built_major, built_minor) != compute_capability:
        return f"{target} code runs on exactly {built_major}.{built_minor}, this GPU is {gpu}"
    if built_major != major:
        return f"{target} code runs on {built_major}.x only, this GPU is {gpu}"
    if built_minor > minor:
        return f"{target} code needs {built_major}.{built_minor} or later, this GPU is {gpu}"
    return None


def ptx_refusal(compute_capability: tuple[int, int], target: str) -> str | None:
    """Why PTX for `target` cannot be compiled for the GPU; None if it can.

    PTX is for every later architecture too; that of 'a' and 'f' targets goes no further than code.
    """
    major, minor, suffix = parse_target(target)
    if suffix:
        reason = refusal(compute_capability, target)
        return reason and "PTX for " + reason.replace(" code", "", 1)
    if (major, minor) <= compute_capability:
        return None
    gpu = "{}.{}".format(*compute_capability)
    return f"PTX for {target} needs {major}.{minor} or later, this GPU is {gpu}"


def resolve(compute_capability: tuple[int, int], candidates: Iterable[Candidate]) -> Resolution:
    """The best candidate for the GPU: the nearest target that runs, arch-specific ones first."""
    rejected: dict[str, str] = {}
    runs: list[tuple[tuple[int, int, str], Candidate]] = []
    for candidate in candidates:
        reason = refusal(compute_capability, candidate.target)
        if reason is None:
            runs.append((parse_target(candidate.target), candidate))
        else:
            rejected[candidate.target] = reason
    if not runs:
        return Resolution(None, rejected)
    runs.sort(key=lambda pair: pair[0])
    best = runs.pop()[1]
    rejected.update({c.target: f"{best.target} is nearer to the GPU" for _, c in runs})
    return Resolution(best, rejected)


def fitting(
    compute_capability: tuple[int, int], entries: Iterable[CubinEntry]
) -> tuple[CubinEntry | None, dict[str, str]]:
    """(the entry that `resolve` chooses, for every other one the reason it fell)."""
    by_target = {entry.target: entry for entry in entries}
    found = resolve(
        compute_capability, [Candidate(entry.arch, target) for target, entry in by_target.items()]
    )
    return by_target[found.chosen.target] if found.chosen else None, found.rejected


def not_found(
    what: str, compute_capability: tuple[int, int], rejected: dict[str, str], *, build: str
) -> CubinNotFoundError:
    """The error when nothing in `rejected` runs: every candidate, and how to get one that does."""
    major, minor = compute_capability
    lines = [f"{what}: no cubin for compute capability {major}.{minor}."]
    lines += [f"  {target}: {reason}" for target, reason in sorted(rejected.items())]
    if not rejected:
        lines.append("  nothing is shipped under that name")
    lines.append(build)
    return CubinNotFoundError("\n".join(lines), rejected=rejected)
