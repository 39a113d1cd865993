"""What ops say to arguments that are nearly right: what to write instead."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the ops are torch ops")

import torch

from kernel_hub import ops
from kernel_hub.errors import TensorError

ROOT = Path(__file__).resolve().parents[3]
A = torch.zeros(4, 256, dtype=torch.bfloat16)
B = torch.zeros(512, 256, dtype=torch.bfloat16)
A8, B8 = A.to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn)
ONES = torch.ones(256, dtype=torch.bfloat16)
Q = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
CACHE = torch.zeros(1, 128, 4, 64, dtype=torch.bfloat16)
BIAS = torch.zeros(12, 64, dtype=torch.bfloat16)
LENGTHS = torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: ops.linear(A.to(torch.float8_e5m2), B),
            "a: expected dtype float16, bfloat16, float32 o",
        ),
        (
            lambda: ops.linear(A8, B.to(torch.float8_e5m2)),
            "expected dtype float8_e4m3fn, as a is",
        ),
        (lambda: ops.linear(A, B, out_dtype="float32"), "the text 'float32': pass torch.float32"),
        (lambda: ops.linear(A8, B8, out_dtype="float32"), "the text 'float32': pass torch.float32"),
        (lambda: ops.rms_norm(A, ONES, out_dtype="e4m3"), "'e4m3': pass torch.float8_e4m3fn, no"),
        (lambda: ops.batched_matmul(A, B, out_dtype="fp32"), "'fp32': pass torch.float32, no text"),
        (
            lambda: ops.batched_matmul(A[None], B.T.contiguous()[None]),
            "b: expected shape (..., n, 256), a row an output (it looks transposed: pass b.mT.cont",
        ),
        (lambda: ops.batched_matmul(A8, B8), "a: expected dtype float16 or bfloat16, found"),
        (lambda: ops.embedding(B, LENGTHS), "ids: expected whole numbers: the ids come first"),
        (lambda: ops.embedding([1, 2], B), "found list [1, 2]: torch.tensor(it, dtype=…, device=…"),
        (
            lambda: ops.decode_attention(Q, CACHE, CACHE, cache_seqlens=LENGTHS.long()),
            "cache_seqlens: expected dtype int32 (cache_seqlens.int()), found shape (1,), int64",
        ),
        (lambda: ops.linear(A, B.T), "expected shape (n, 256), a row an output (it looks transpos"),
        (lambda: ops.linear(A, B.T), "pass b.T), found shape (256, 512)"),
        (lambda: ops.linear(A, B.T.contiguous()), "pass b.T.contiguous()), found shape (256, 512)"),
        (lambda: ops.linear(A8, B8.T), "pass b.T), found shape (256, 512)"),
        (lambda: ops.rms_norm(A, ONES, eps="1e-6"), "found str '1e-6'; pass eps=float('1e-6')"),
        (lambda: ops.rms_norm(A, ONES, eps="small"), "eps: expected a number, found str 'small'"),
        (lambda: ops.rms_norm(np.zeros((4, 8), "f"), ONES), "(4, 8): torch.from_numpy(it)"),
        (
            lambda: ops.decode_attention(
                Q,
                CACHE,
                CACHE,
                cache_seqlens=LENGTHS,
                k=Q,
                v=Q,
                qkv_bias=BIAS,
            ),
            "qkv_bias: expected shape (768,) (.reshape(-1) has it), found shape (12, 64)",
        ),
    ],
)
def test_what_to_write_instead(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(TensorError) as caught:
        call()
    assert said in str(caught.value)


def test_ops_without_torch(tmp_path: Path) -> None:
    code = """
import sys
class Hide:
    def find_spec(self, name, *args):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Hide())
import kernel_hub
try:
    kernel_hub.ops
except kernel_hub.errors.MissingPackageError as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "torch is not installed: pip install torch (or 'kernel_hub[torch]')" in done.stdout
