"""What several test files do with the stand-in: streams of its own, child processes on it."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes import byref, c_void_p
from pathlib import Path

from kernel_hub import DeviceArray, driver

from . import FakeCuda

ROOT = Path(__file__).resolve().parent.parent.parent
# What most launches of the tests are: the shipped launch_probe_5 on 1024 elements.
GRID, BLOCK = (4, 1, 1), (256, 1, 1)
PROBE_CUBIN = ROOT / "cubins" / "sm90" / "launch_probe.cubin"


def arrays(count: int = 3) -> list[DeviceArray]:
    """Arrays for launch_probe_5."""
    return [DeviceArray.zeros(1024, "fp32") for _ in range(count)]


def make_stream(device: int = 0, *, blocking: bool = True) -> int:
    """A new stream of `device`; torch's are not blocking: the legacy stream ignores them."""
    handle = c_void_p()
    drv = driver.get()
    with drv.on_device(device):
        drv.call("cuStreamCreate", byref(handle), 0 if blocking else 1)
    return handle.value or 0


def run_child(fake: FakeCuda, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a Python of its own on `fake`'s library; any warning is an error there."""
    environment = {**os.environ, driver.LIBRARY_VARIABLE: fake.path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )


def check_fork(fake: FakeCuda, make: str, uses: str, after: str) -> None:
    """What `make` made: each of `uses` says in a forked child what is wrong, its death there is
    quiet, and `after` goes on in the parent."""
    done = run_child(
        fake,
        "import os, sys, warnings\n"
        "from kernel_hub import DeviceArray, empty_pinned, memory_stats\n"
        f"{make}\n"
        "warnings.simplefilter('ignore')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        f"    for use in ({uses}):\n"
        "        try:\n"
        "            use()\n"
        "        except RuntimeError as error:\n"
        "            assert 'forked' in str(error) and 'spawn' in str(error), error\n"
        "        else:\n"
        "            print('no error')\n"
        "    del use, array\n"
        "    sys.exit(7)\n"
        "_, status = os.waitpid(child, 0)\n"
        "assert os.waitstatus_to_exitcode(status) == 7, status\n"
        f"{after}\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
