"""`kernel-hub tune` for real: every candidate of every op is right, and what is written is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the ops are torch ops")

from kernel_hub.measure import tune, tune_ops  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

# Prints what the op launches for one product, and for one that no file is about.
USE = """
import sys, torch
from kernel_hub.ops import linear
from kernel_hub.ops.core.device import device_of
from kernel_hub.ops.matmul import linear_plan
gpu = device_of(torch.device("cuda:0")).gpu
for m in (8, 9):
    row = linear_plan.TABLE.lookup(gpu, m, n=1536, k=256)
    choice = linear_plan.choose(*gpu[:2], m, 1536, 256, False, gpu.name)
    assert row is None or choice.variant == row.variant
    print(row)
a, b = (torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16) for rows in (8, 1536))
torch.testing.assert_close(linear(a, b), a @ b.T, rtol=2e-2, atol=0.5)
"""


@pytest.mark.parametrize("size", [8, 200])
@pytest.mark.parametrize("op", sorted(tune_ops.TUNABLE))
def test_every_candidate_is_right(op: str, size: int) -> None:
    tunable = tune_ops.TUNABLE[op]
    gpu = tune.current_gpu()
    for shape in dict.fromkeys((next(iter(tunable.shapes)), [*tunable.shapes][-1])):
        key = {**tunable.shapes[shape], "k": 256}
        if not list(tunable.candidates(gpu, size, key)):
            pytest.skip(f"{op} has nothing to choose from on {gpu.arch}")
        found = tune.measure(tunable, gpu, size, key, tunable.dtypes[0], rounds=1)
        assert not found.refused
        assert 0 < found.best_us <= found.default_us < 1e5


def test_what_is_written_is_used(tmp_path: Path) -> None:
    env = {
        **os.environ, "XDG_CACHE_HOME": str(tmp_path), "KERNEL_HUB_TUNED": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip

    def python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error::RuntimeWarning", *arguments],
            env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert python("-c", USE) == "None\nNone\n"
    command = ("-m", "kernel_hub", "tune", "linear", "--shapes", "1536x256", "--sizes", "8")
    said = python(*command, "--rounds", "1")
    (path,) = tmp_path.rglob("*.json")
    assert f"wrote {path}" in said
    (gpu,) = json.loads(path.read_text())["gpus"]
    (row,) = gpu["choices"]["n=1536 k=256"]
    assert python("-c", USE).startswith(row["variant"])
    assert python("-c", USE).endswith("\nNone\n")
