"""The first gradients of a process: what the forward gets ready for them, and what they begin.

A process of its own on the stand-in for libcuda, as `first_python.py` has it.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakecuda import FakeCuda

ROOT = Path(__file__).resolve().parents[3]
SM90, PORTABLE = "flash_attention_backward_sm90", "flash_attention_backward"
LAUNCHED = [f"{SM90}_bf16_{rest}" for rest in ("hdim64_delta", "hdim64_rows128", "convert")]
CODE = """
import json, threading, types
import torch
from fakecuda import FakeCuda
import first_python
fake = FakeCuda()
first_python.begin(fake.path)
from kernel_hub import ops
from kernel_hub.collection.manifest import Collection
from kernel_hub.driver import apart
from kernel_hub.ops.attention.backward import portable
from kernel_hub.registry import own

begun, reads, steps, lock = [0], [], [], threading.Lock()
start, read = apart._thread.start_new_thread, Collection.read

def counted(*args):
    begun[0] += 1
    return start(*args)

def noted(collection, entry):
    with lock:
        reads.append(entry.name)
    return read(collection, entry)

apart._thread = types.SimpleNamespace(start_new_thread=counted)
Collection.read = noted
fake.record(True)

def half(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype).requires_grad_()

def step(call):
    "What a call begins and reads, and what the driver loads and launches for it."
    begun[0] = 0
    reads.clear()
    before = fake.calls("cuLibraryLoadData"), fake.launch_count
    try:
        found, said = call(), ""
    except Exception as error:
        found, said = None, f"{type(error).__name__}: {error}"
    now = begun[0]
    apart.wait()
    launched = [launch.name for launch in fake.launches()][before[1]:]
    steps.append([now, sorted(reads), fake.calls("cuLibraryLoadData") - before[0], launched, said])
    return found

def gradients(out, *inputs, **how):
    return torch.autograd.grad(out, inputs, torch.ones_like(out).detach(), **how)

def done():
    print(json.dumps(steps))
"""


@functools.cache
def _steps(scenario: str) -> list[list[Any]]:
    tests = ROOT / "tests"
    path = os.pathsep.join(map(str, (ROOT, tests, tests / "ops")))
    done = subprocess.run(
        [sys.executable, "-c", f"{CODE}\n{scenario}\ndone()"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps: list[list[Any]] = json.loads(done.stdout)
    return steps


@pytest.fixture(autouse=True)
def stand_in(fakecuda: FakeCuda) -> None:
    """Skips where there is no compiler for it."""


def test_the_forward_reads_what_the_gradients_load() -> None:
    none, forward, backward, again = _steps("""
q, k, v = (half(1, 248, 4, 64) for _ in range(3))
with torch.no_grad():
    step(lambda: ops.flash_attention(q, k, v, causal=True))
out = step(lambda: ops.flash_attention(q, k, v, causal=True))
step(lambda: gradients(out, q, k, v, retain_graph=True))
step(lambda: gradients(out, q, k, v))
""")
    assert SM90 not in none[1] and none[2] == len(none[3]) == 1
    assert forward[1] == [SM90] and forward[2] == 0 and len(forward[3]) == 1
    # One thread loads all three functions, of an image that is there.
    assert backward == [1, [], 1, LAUNCHED, ""]
    assert again == [0, [], 0, LAUNCHED, ""]


def test_gradients_at_once_in_a_thread_of_their_own() -> None:
    """As autograd runs them for a GPU, and with nothing waited for in between."""
    both, packed = _steps("""
def at_once():
    q, k, v = (half(1, 248, 4, 64) for _ in range(3))
    out = ops.flash_attention(q, k, v, causal=True)
    thread = threading.Thread(target=gradients, args=(out, q, k, v))
    thread.start()
    thread.join()

def packed():
    qkv = half(8, 300, 3, 16, 128)
    found, = gradients(ops.flash_attention_qkvpacked(qkv), qkv)
    assert found.shape == qkv.shape

step(at_once)
step(packed)
""")
    assert both[2] == 2 and both[3][1:] == LAUNCHED and not both[4]
    assert both[1].count(SM90) == 1
    assert packed[1:] == [[], 0, packed[3], ""] and len(packed[3]) == 4
    # Functions of the forward and of the gradients, in one thread each; and what asks ahead.
    assert packed[0] == 3


def test_nothing_is_begun_while_a_graph_is_captured() -> None:
    forward, backward = _steps("""
torch.cuda.is_current_stream_capturing = lambda: True
q, k, v = (half(1, 248, 4, 64) for _ in range(3))
out = step(lambda: ops.flash_attention(q, k, v, causal=True))
step(lambda: gradients(out, q, k, v))
""")
    assert forward[0] == 1 and SM90 not in forward[1]
    assert backward == [3, [SM90], 1, LAUNCHED, ""]


def test_the_portable_kernels() -> None:
    forward, backward, wide = _steps("""
slopes = torch.rand(4)
q, k, v = (half(1, 248, 4, 64) for _ in range(3))
out = step(lambda: ops.flash_attention(q, k, v, alibi_slopes=slopes))
step(lambda: gradients(out, q, k, v))
portable.sm90.is_enabled = False
q, k, v = (half(1, 48, 4, 128, dtype=torch.float16) for _ in range(3))
step(lambda: gradients(ops.flash_attention(q, k, v), q, k, v))
""")
    assert PORTABLE in forward[1] and forward[2] == len(forward[3]) == 1
    assert backward[:3] == [1, [], 1] and len(backward[3]) == 3
    assert [name.startswith(PORTABLE) for name in backward[3]] == [True] * 3
    assert wide[2] == 0 and PORTABLE not in wide[1] and len(wide[3]) == 4


def test_the_registered_ops() -> None:
    """What torch.compile calls: nothing says there whether gradients will be asked for."""
    forward, backward = _steps("""
q, k, v = (half(1, 248, 4, 64).detach() for _ in range(3))
options = [True, None, [-1, -1], 0.0, *[None] * 8, False]
call = torch.ops.kernel_hub.flash_attention
out, lse = step(lambda: call(q, k, v, *options, False, True))
call_back = torch.ops.kernel_hub.flash_attention_backward
step(lambda: call_back(torch.ones_like(out), q, k, v, out, lse, *options, False))
""")
    assert SM90 not in forward[1] and not forward[4]
    assert backward == [1, [SM90], 1, LAUNCHED, ""]


def test_a_damaged_cubin_is_said_by_the_gradients() -> None:
    forward, backward, mended = _steps("""
def damaged(collection, entry):
    if entry.name == "flash_attention_backward_sm90":
        from kernel_hub.errors import CubinCorruptError
        raise CubinCorruptError("damaged")
    return noted(collection, entry)

q, k, v = (half(1, 248, 4, 64) for _ in range(3))
Collection.read = damaged
out = step(lambda: ops.flash_attention(q, k, v, causal=True))
step(lambda: gradients(out, q, k, v, retain_graph=True))
Collection.read = noted
step(lambda: gradients(out, q, k, v))
""")
    assert not forward[4] and len(forward[3]) == 1
    assert backward[3:] == [[], "CubinCorruptError: damaged"]
    assert mended[2:] == [1, LAUNCHED, ""]
