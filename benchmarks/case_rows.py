"""Cases measured one after the other to rows that the caller makes; failures are rows too."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import harness
import torch


def measured(
    cases: Iterable[Any], measure: Callable[[Any, int], dict[str, Any]], rounds: int,
    seconds: float = math.inf,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row of each case, printed as it is there; no new case after `seconds`."""
    started, rows = time.monotonic(), list[dict[str, Any]]()
    for case in cases:
        if time.monotonic() - started > seconds:
            print("out of time")
            break
        try:
            rows.append(measure(case, rounds))
        except (AssertionError, RuntimeError, ValueError) as error:
            rows.append({"case": str(case), "FAILED": str(error)[:300]})
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    return rows


def write(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """Into --out, behind what the run is about."""
    if options.out:
        options.out.write_text(json.dumps([options.about, *rows], indent=1))


def main(
    about: str | None, quick: Sequence[Any], cases: Sequence[Any],
    measure: Callable[[Any, int], dict[str, Any]], rounds: int,
) -> None:  # fmt: skip
    """Parse the command line, measure, print."""
    options = harness.arguments(
        (about or "").splitlines()[0], rounds=rounds, quick={"rounds": 3},
        more=lambda parser: parser.add_argument(
            "--seconds", type=float, default=math.inf, help="no new case after these"
        ),
    )  # fmt: skip
    chosen = quick if options.quick else cases
    write(options, measured(chosen, measure, options.rounds, options.seconds))
