"""Faults on a real GPU, each in a child process: sticky errors named, forks refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent.parent


def run_child(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, **environment}, timeout=120,
    )  # fmt: skip
    return done.stdout + done.stderr


FAULT = """
import sys, torch
from kernel_hub import Kernel
k = Kernel(sys.argv[1] if len(sys.argv) > 1 else {path!r}, ["bad_address", "add_table"])
out = torch.zeros(4, device="cuda", dtype=torch.int32)
for name in ("bad_address", *["add_table"] * 100):  # other processes may have the GPU for a while
    try:
        k[name](1, 4, params=[out])
        if name == "add_table":
            import time; time.sleep(0.2)
    except Exception as error:
        print(name, type(error).__name__, error)
        break
"""


def test_a_fault_is_said_to_be_of_an_earlier_kernel_or_named(cubin: Path) -> None:
    text = run_child(FAULT.format(path=str(cubin)))
    assert "add_table CudaDriverError" in text
    assert "ran earlier" in text
    text = run_child(FAULT.format(path=str(cubin)), KERNEL_HUB_LAUNCH_BLOCKING="1")
    assert "bad_address CudaDriverError" in text
    assert "this kernel is the one that failed" in text


FORK = """
import os, torch
from kernel_hub import Kernel
x = torch.zeros(1024, device="cuda")
f = Kernel("launch_probe").launch_probe_5
f(4, 256, params=[x, x, x, 1024, 1.0]); torch.cuda.synchronize()
bound = f.bind(4, 256, 0, 0, [x, x, x, 1024, 1.0])
child = os.fork()
if child == 0:
    for call in (lambda: f(4, 256, 0, 0, [x, x, x, 1024, 1.0]), bound):
        try:
            call(); print("launched", flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
f(4, 256, params=[x, x, x, 1024, 1.0]); torch.cuda.synchronize(); print("parent goes on")
"""


def test_fork() -> None:
    text = run_child(FORK)
    assert text.count("spawn") == 2
    assert "launched" not in text
    assert "parent goes on" in text
