"""A child process that calls fmha_v2 kernels, one at a time.

A kernel that ends its context (an assertion, an address of nothing), hangs or kills the process
fails alone: the next one gets a new child.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MOST_TEXT = 3000
_CHILD = (sys.executable, __file__)


@dataclass(frozen=True)
class Outcome:
    """How a job went: what was found, or why it failed."""

    text: str
    failed: bool = False


class Worker:
    """The child, started by the first job. `command`: what reads jobs and answers them."""

    def __init__(self, command: Sequence[str] = _CHILD, timeout_s: float = 240) -> None:
        self._command, self._timeout_s = command, timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - it ends with its owner
        self.started = 0

    def run(self, path: Path, name: str) -> Outcome:
        """Call the kernel `name` of the file `path`."""
        first = self._printed.seek(0, os.SEEK_END)
        child = self._child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps([str(path), name]).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: there is no answer either
        ready, _, _ = select.select([child.stdout], [], [], self._timeout_s)
        answer = child.stdout.readline() if ready else b""
        if answer.endswith(b"\n"):
            said = json.loads(answer)
            if not said.pop("broken"):
                return Outcome(**said)
            why = said["text"]
        elif ready:
            why = f"the process ended, exit status {child.wait()}"
        else:
            why = f"no answer in {self._timeout_s} s"
        self.close()
        self._printed.seek(first)
        printed = self._printed.read(_MOST_TEXT).decode(errors="replace").strip()
        return Outcome(f"broke its process: {why}; it printed: {printed or 'nothing'}", failed=True)

    def close(self) -> None:
        """End the child, whatever it does."""
        if (child := self._child) is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        pass
        self._child = None

    def _start(self) -> subprocess.Popen[bytes]:
        self.started += 1
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=self._printed, env=env
        )


def main() -> None:
    """Answer each line, a path and a kernel's name, by one."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what kernels print is no answer
    import torch
    from fmha_cases import call

    for line in sys.stdin:
        path, name = json.loads(line)
        failed = broken = True
        try:
            text, failed = call(Path(path), name), False
        except AssertionError as error:
            text = str(error)
        except Exception:  # noqa: BLE001 - it is the parent's to report
            text = traceback.format_exc()
        try:
            torch.cuda.synchronize()
            broken = False
        except Exception as error:  # noqa: BLE001
            text = text if failed else str(error)
        answer = {"text": text, "failed": failed, "broken": broken}
        print(json.dumps(answer), file=answers, flush=True)
        if broken:
            os._exit(1)


if __name__ == "__main__":
    main()
