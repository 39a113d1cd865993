"""Python processes that have torch from their start: forks of one that imported it, and no more.

Importing it takes most of the time of a short process: two seconds each.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Forks for each line; a fork leaves the loop and is from there on what the line says.
_SERVER = """
import json, os, runpy, sys, torch
own = os.fdopen(os.dup(1), "w")
def wanted():
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            said = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
        else:
            said = os.fork()
            if not said:
                return asked
        print(said, file=own, flush=True)
    os._exit(0)
asked = wanted()
own.close()
for number, path in ((0, os.devnull), (1, asked["out"]), (2, asked["err"])):
    os.dup2(os.open(path, os.O_RDWR), number)
sys.stdin = open(os.devnull)
os.chdir(asked["cwd"])
os.environ.clear()
os.environ.update(asked["env"])
if "OMP_NUM_THREADS" in os.environ:  # which was read before there was one
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
kind, *rest = asked["command"]
found = asked["env"].get("PYTHONPATH", "").split(os.pathsep)
start = "" if kind in ("-c", "-m") else os.path.dirname(os.path.abspath(kind))
sys.path[:1] = [start, *filter(None, found)]
if kind == "-c":
    sys.argv = ["-c", *rest[1:]]
    exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
elif kind == "-m":
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
else:
    sys.argv = [kind, *rest]
    runpy.run_path(kind, run_name="__main__")
"""


class Started(NamedTuple):
    """A process that runs; its texts lie in `folder`."""

    pid: int
    folder: tempfile.TemporaryDirectory[str]

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Code and texts; a process that takes longer is killed, and a code below 0 says so."""
        try:
            code = _ask({"wait": self.pid}, timeout)
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            code = int(_reply(60))
        out, err = (Path(self.folder.name, name).read_text() for name in ("out", "err"))
        self.folder.cleanup()
        return subprocess.CompletedProcess([], code, out, err)


def start(command: Sequence[str], *, env: Mapping[str, str], cwd: str | Path = ".") -> Started:
    """`python *command`, of -c, -m or a file, in an environment that is `env` alone."""
    folder = tempfile.TemporaryDirectory(prefix="kernel_hub_warm_")
    texts = {name: os.path.join(folder.name, name) for name in ("out", "err")}
    for path in texts.values():
        Path(path).touch()
    asked = {"command": list(command), "env": dict(env), "cwd": os.path.abspath(cwd), **texts}
    return Started(_ask(asked, 60), folder)


def run(
    command: Sequence[str], *, env: Mapping[str, str], cwd: str | Path = ".", timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    """The same to its end."""
    return start(command, env=env, cwd=cwd).wait(timeout)


@functools.cache
def _server() -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], cwd=tempfile.gettempdir(), env=env,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        server.kill()


def _ask(what: dict[str, Any], timeout: float) -> int:
    stdin = _server().stdin
    assert stdin is not None
    stdin.write(json.dumps(what) + "\n")
    stdin.flush()
    return int(_reply(timeout))


def _reply(timeout: float) -> str:
    stdout = _server().stdout
    assert stdout is not None
    if not select.select([stdout], [], [], timeout)[0]:
        raise TimeoutError
    return stdout.readline()
