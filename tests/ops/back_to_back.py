"""A watchdog: launches back to back in a process of its own, which is ended if one hangs."""

from __future__ import annotations

import subprocess
import sys

from emulated import ROOT

SECONDS = 40.0

# What `cases` may use, and then what is done with it.
_BEFORE = """
import itertools
from functools import partial
import torch
from kernel_hub import ops
fp16, bf16, e4m3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
def randn(*shape, dtype=bf16):
    return torch.randn(*shape, device="cuda").to(dtype)
torch.manual_seed(0)
"""
_AFTER = """
def tensors(found):
    return [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]

def bits(x):
    return x.contiguous().view(torch.uint8)

def run_all(cases):
    expected = [[bits(x).clone() for x in tensors(run())] for run in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    differs = []
    for i in range(LAUNCHES):
        which = i % len(cases)
        with torch.cuda.stream(streams[i % 7 % 3]):
            found = tensors(cases[which]())
            if i % 9 == 8:
                for x, right in zip(found, expected[which], strict=True):
                    differs.append((which, (bits(x) != right).any()))
    torch.cuda.synchronize()
    return sorted({which for which, differ in differs if bool(differ)})

wrong = run_all(list(cases))
assert not wrong, f"other bits than the first time: cases {wrong}"
print("done")
"""


def check_back_to_back(cases: str, *, launches: int = 1000, seconds: float = SECONDS) -> None:
    """Run 1,000 launches of `cases` on three streams; every ninth must repeat its first bits.

    cases: Python text that binds `cases`, callables that launch and return a tensor or a tuple;
        torch, ops, partial, itertools, randn(*shape, dtype=bf16), fp16, bf16 and e4m3 are there.

        check_back_to_back("cases = [partial(ops.linear, randn(m, 512), randn(4096, 512))"
                           " for m in (1, 16, 300)]")
    """
    code = f"{_BEFORE}\n{cases}\n{_AFTER.replace('LAUNCHES', str(launches))}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{launches} launches were not done after {seconds} s") from None
    assert done.stdout == "done\n", done.stderr[-2000:]
