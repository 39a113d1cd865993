"""A progress bar on stderr: rich's on a terminal that has it, else plain lines. Knows nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import TextIO


def is_rich(stream: TextIO) -> bool:
    """Whether `stream` is a terminal and rich is installed."""
    return stream.isatty() and importlib.util.find_spec("rich") is not None


@contextlib.contextmanager
def progress(total: int, label: str) -> Iterator[Callable[[str], None]]:
    """Gives `advance(text)`, to be called at the start of each of `total` steps; on stderr.

    A bar where rich is on a terminal, else a line a step.
    """
    if is_rich(sys.stderr):
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total)

            def advance(text: str) -> None:
                bar.update(task, advance=1, description=f"{label}: {text}")

            yield advance
        return
    done = 0

    def advance_plainly(text: str) -> None:
        nonlocal done
        done += 1
        print(f"[{min(done, total)}/{total}] {label}: {text}", file=sys.stderr, flush=True)

    yield advance_plainly
