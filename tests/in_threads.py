"""Jobs in threads of their own, all at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_threads(*jobs: Callable[[], Any]) -> None:
    """Run each to its end; raises the first failure there was."""
    failures: list[BaseException] = []

    def run(job: Callable[[], Any]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure
