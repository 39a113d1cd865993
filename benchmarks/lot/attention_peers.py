"""Other libraries' attention, found and called: what several benchmarks put beside ours.

Each raises ImportError where the library is not there.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

FA2, CUDNN, FA3, FA4, FLASHINFER = ATTENTION_PEERS = (
    "torch flash", "torch cuDNN", "FlashAttention-3", "FlashAttention-4", "FlashInfer",
)  # fmt: skip
BACKENDS = {FA2: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}
FLASHINFER_HEAD_DIMS = (64, 128, 256)  # of its kernels for caches
_WORKSPACE_BYTES = 256 << 20
Launch = Callable[[], torch.Tensor]


@cache
def fa3() -> Any:
    """FlashAttention-3's forward op, from the fa3-fwd wheel: bf16 and e4m3; neither windows nor
    pages."""
    spec = importlib.util.find_spec("fa3_fwd")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("no fa3_fwd package")
    for library in Path(spec.submodule_search_locations[0]).glob("*.so"):
        torch.ops.load_library(str(library))
    return torch.ops.fa3_fwd.fwd


@cache
def xformers_fa3(op: str = "fwd") -> Any:
    """FlashAttention-3's forward or backward ("bwd") op, from xformers: bf16 and fp16, windows and
    pages; neither e4m3 nor softcap."""
    for folder in sys.path:
        for name in ("xf_fa3_C.so", "xformers/flash_attn_3/_C.so"):
            if (Path(folder) / name).is_file():
                torch.ops.load_library(str(Path(folder) / name))
                return getattr(torch.ops.flash_attn_3, op)
    raise ImportError("no FlashAttention-3 of xformers")


def has_fa4() -> bool:
    """Whether FlashAttention-4's wheel is there."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def fa4() -> Any:
    """FlashAttention-4's `flash_attn_func`, compiled at the first call of a kind."""
    return importlib.import_module("flash_attn.cute").flash_attn_func


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, name: str) -> Launch:
    """torch's scaled_dot_product_attention by FA2 or CUDNN, of (batch, seqlen, heads, head_dim)."""
    views = [x.transpose(1, 2) for x in (q, k, v)]
    grouped, backend = q.shape[2] != k.shape[2], BACKENDS[name]

    def launch() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                *views, is_causal=causal, enable_gqa=grouped
            )
        return out.transpose(1, 2)

    return launch


def torch_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float,
    bounds: torch.Tensor | None = None, longest: int = 0, window: tuple[int, int] = (-1, -1),
) -> Launch:  # fmt: skip
    """FlashAttention-2 without the choice of a backend: varlen by its bounds, windows."""
    op = torch.ops.aten._flash_attention_forward
    lengths = (longest, longest) if bounds is not None else (q.shape[1], k.shape[1])
    left, right = (None if x < 0 else x for x in window)
    if causal and left is not None:
        right = 0
    return lambda: op(
        q, k, v, bounds, bounds, *lengths, 0.0, causal, False, scale=scale,
        window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip


@cache
def _workspace() -> torch.Tensor:
    """Of one call at a time, for all plans."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def flashinfer_paged(
    table: torch.Tensor, seqlens_q: Sequence[int], seqlens_k: Sequence[int],
    heads: tuple[int, int, int], page_size: int, dtype: torch.dtype, backend: str = "fa2",
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """(q of all tokens, (k pages, v pages)) -> out, causal, planned beforehand for these lengths.

    backend: of its prefill; "fa2" splits the keys, and is what its decode has compiled already.
    """
    flashinfer = importlib.import_module("flashinfer")
    num_heads, num_kv_heads, head_dim = heads
    counts = [-(-length // page_size) for length in seqlens_k]
    indptr = _starts(counts)
    indices = torch.cat([row[:n] for row, n in zip(table, counts, strict=True)]).int()
    last = torch.tensor([(n - 1) % page_size + 1 for n in seqlens_k], dtype=torch.int32)
    shared = (num_heads, num_kv_heads, head_dim, page_size)
    dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
    workspace = _workspace() if table.is_cuda else torch.empty(0)
    if max(seqlens_q) == 1:
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend="fa2"
        )
        decode.plan(indptr, indices, last, *shared, **dtypes)
        run: Callable[..., torch.Tensor] = decode.run
        return run
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    prefill.plan(_starts(seqlens_q), indptr, indices, last, *shared, causal=True, **dtypes)
    run = prefill.run
    return run


def _starts(counts: Sequence[int]) -> torch.Tensor:
    """(len + 1,) int32, on the host, where its plans are made."""
    return torch.tensor([0, *counts]).cumsum(0).int()
