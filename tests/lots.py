"""Drawing by lot: one seed a test, of $KERNEL_HUB_SEED where it is set; a failure prints it."""

from __future__ import annotations

import os
import random

SEED = int(os.environ.get("KERNEL_HUB_SEED", "20261122"))


class Lots(random.Random):
    """A generator that says in an assertion how to draw the same again."""

    def __new__(cls, *what: object) -> Lots:
        return super().__new__(cls)  # Python 3.10's takes no more

    def __init__(self, *what: object) -> None:
        super().__init__(repr((SEED, *what)))
        self.what = what

    def __str__(self) -> str:
        return f"KERNEL_HUB_SEED={SEED} draws {self.what} again"
