"""Every kernel compiled into the ops' cubins is one some plan chooses, and the example kernel."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import ROOT, CannotEmulateError, build
from ways import DTYPES, Way

from kernel_hub.ops import _common


def exported(cubin: str) -> set[str]:
    """The extern "C" kernels of a source, as the compiler sees them."""
    try:
        library = Path(build(cubin)._name)
    except CannotEmulateError as missing:
        pytest.skip(str(missing))
    names = re.findall(rb"\b(?:rms_norm|silu_and_mul|rope)_[a-z0-9_]+", library.read_bytes())
    found = {name.decode() for name in names}
    return {name for name in found if any(token in name for token in ("fp16", "bf16", "fp32"))}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    names: set[str] = set()
    monkeypatch.setattr(_common, "shipped", lambda cubin, name: names.add(name))
    return names


def module(name: str) -> Any:
    return importlib.import_module(f"kernel_hub.ops.{name}")


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_rms_norm(chosen: set[str]) -> None:
    hiddens = [8, 129, *(2**i for i in range(5, 16)), 5120, 40960]
    for dtype, hidden, rows in itertools.product(DTYPES, hiddens, [1, 1024, 8192, 32768]):
        x, weight = meta(rows, hidden, dtype=dtype), meta(hidden, dtype=dtype)
        module("rms_norm")._plan(x, None, weight, x, None, 0)
        module("rms_norm")._plan(x, x, weight, x, x.clone(), 0)
        wide = meta(rows, 2 * hidden, dtype=dtype)[:, :hidden]
        module("rms_norm")._plan(wide, None, weight, x, None, 0)
        module("rms_norm")._plan(wide, x, weight, x, x.clone(), 0)
    assert chosen == exported("rms_norm")


def test_silu_and_mul(chosen: set[str]) -> None:
    for dtype, size in itertools.product(DTYPES, [129, 4096]):
        plan: Callable[..., Any] = module("silu_and_mul")._plan
        plan(meta(4, 2 * size, dtype=dtype), meta(4, size, dtype=dtype), 0)
        plan(meta(4, 4 * size, dtype=dtype)[:, : 2 * size], meta(4, size, dtype=dtype), 0)
    assert chosen == exported("silu_and_mul")


def test_rope(chosen: set[str]) -> None:
    for dtype, table32, interleaved, tokens, head_dim in itertools.product(
        DTYPES, [False, True], [False, True], [1, 1024, 8192, 32768], [16, 64, 128, 80, 18]
    ):
        table = meta(tokens, head_dim // 2, dtype=torch.float32 if table32 else dtype)
        k = meta(tokens, 8, head_dim, dtype=dtype)
        for num_heads in (32, 64):
            q = meta(tokens, num_heads, head_dim, dtype=dtype)
            module("rope")._plan(q, k, table, table, None, interleaved, head_dim, q, k, 0)
            wide = meta(tokens, num_heads, 2 * head_dim, dtype=dtype)[..., :head_dim]
            module("rope")._plan(wide, k, table, table, None, interleaved, head_dim, q, k, 0)
    assert chosen == exported("rope")


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul", "rope", "matmul_cache_kernel"])
def test_the_list_of_variants_ends_the_file(name: str) -> None:
    last = (ROOT / f"csrc/{name}.cu").read_text().rstrip().splitlines()[-12:]
    assert any("EXPORT_" in line or "matmul_tile(" in line for line in last)


@pytest.mark.gpu
def test_matmul_cache_kernel(way: Way) -> None:
    from kernel_hub import Kernel

    if not way.is_gpu:
        pytest.skip("its shared memory is dynamic, which the emulator has not")
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.float16) for _ in range(2))
    c = torch.full((512, 512), float("nan"), device="cuda")
    kernel = Kernel("matmul_cache_kernel", function_names=["matmul_cache_kernel_0d1d2d"])
    kernel.matmul_cache_kernel_0d1d2d(
        gridDim=(8, 8, 1), blockDim=(32, 32, 1), sharedMemBytes=16384, stream=0, params=[a, b, c]
    )
    torch.cuda.synchronize()
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-3)
