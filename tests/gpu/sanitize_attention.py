"""Every variant of the attention kernels over ragged shapes once, for compute-sanitizer. Nothing is
compared: tests/gpu_attention_grid.py does that. tests/ops/attention/test_attention_limits.py holds
that none is left out.

for tool in memcheck racecheck initcheck synccheck; do
    compute-sanitizer --tool $tool --error-exitcode 1 python tests/gpu/sanitize_attention.py
done
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

from attention_cases import Case, call, make

from kernel_hub import ops
from kernel_hub.ops.attention import forward_sm90 as hopper
from kernel_hub.ops.attention import forward_split_sm90 as split
from kernel_hub.ops.attention.backward import sm90 as hopper_backward
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.kv_cache import decode_sm90

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
BYTES = (torch.float8_e4m3fn, torch.int8)
# The head_dim of each body, and one that fills it in part.
HEAD_DIMS = (16, 32, 64, 72, 96, 128, 136, 160, 192, 200, 256)
# And of its own for v: Hopper's body for it, in part; and one that is more.
HEADS = (*((head_dim, None) for head_dim in HEAD_DIMS), (192, 128), (136, 72), (64, 200))


def forward(device: str) -> None:
    """Dense, in pages, and what takes the general kernel; tiles that end within."""
    fp32 = itertools.product(("fp32",), ((16, None), (72, None), (128, None)))
    for dtype, (head_dim, own_head_dim_v) in itertools.chain(
        itertools.product(DTYPES, HEADS), fp32
    ):
        case = Case(
            dtype=dtype, head_dim=head_dim, num_heads=3, num_kv_heads=1, causal=True,
            lengths_q=(5, 0, 150), lengths_k=(70, 3, 201), seed=1, sinks=dtype,
            own_head_dim_v=own_head_dim_v,
        )  # fmt: skip
        for layout, softcap in itertools.product(("varlen", "varlen_paged", "cache"), (0.0, 30.0)):
            ragged = dataclasses.replace(case, layout=layout, softcap=softcap)
            if layout == "cache":
                ragged = dataclasses.replace(ragged, lengths_q=(150,) * 3, window_size=(30, 9))
            call(ragged, make(ragged, device), return_lse=True)


def byte_caches(device: str) -> None:
    """Lengths that end within a block, pages, a window; the attention behind is `forward`'s."""
    for dtype, layout, kind in itertools.product(DTYPES, ("varlen", "cache", "paged"), BYTES):
        case = Case(
            layout, dtype, 64, 4, 2, (150,) * 3, (70, 0, 601), causal=True, window_size=(30, -1)
        )
        inputs = make(case, device)
        inputs.tensors[1:] = [x.nan_to_num().to(kind) for x in inputs.tensors[1:]]
        scale = torch.ones(2, device=device)
        of_tokens = torch.ones(inputs.tensors[1].shape[:-1], device=device)
        call(case, inputs, k_scale=scale, v_scale=scale)
        call(case, inputs, k_scale_cache=of_tokens, v_scale_cache=of_tokens)


def backward(device: str) -> None:
    """The same of the gradients, in any order and deterministic."""
    for dtype, head_dim in itertools.product(DTYPES, HEAD_DIMS):
        for softcap, deterministic, causal in itertools.product((0.0, 2.0), *[(False, True)] * 2):
            case = Case(
                dtype=dtype, head_dim=head_dim, num_heads=4, num_kv_heads=2, softcap=softcap,
                layout="varlen", lengths_q=(5, 0, 150), lengths_k=(70, 3, 201), causal=causal,
            )  # fmt: skip
            inputs = make(case, device)
            inputs.tensors = [x.detach().requires_grad_() for x in inputs.tensors]
            with torch.enable_grad():
                out = call(case, inputs, deterministic=deterministic)
                torch.autograd.grad(out, inputs.tensors, torch.ones_like(out))


def decode(device: str) -> None:
    """One token and many, both kinds of cache, split and whole, appending and not."""
    for dtype, head_dim, is_e4m3 in itertools.product(DTYPES.values(), HEAD_DIMS, (False, True)):
        if is_e4m3 and head_dim % 16:
            continue
        lengths = torch.tensor([600, 3, 17], device=device, dtype=torch.int32)
        table = torch.arange(3 * 40, device=device, dtype=torch.int32).view(3, 40)
        pages = [
            torch.zeros(120, 16, 2, head_dim, device=device, dtype=dtype).to(
                torch.float8_e4m3fn if is_e4m3 else dtype
            )
            for _ in range(2)
        ]
        angles = torch.zeros(700, head_dim // 2, device=device)
        for seqlen_q, softcap, num_splits in itertools.product((1, 16), (0.0, 2.0), (0, 1, 3)):
            q = torch.zeros(3, seqlen_q, 8, head_dim, device=device, dtype=dtype)
            options = {"softcap": softcap, "num_splits": num_splits, "block_table": table}
            if softcap == 0:
                options["sinks"] = torch.zeros(8, device=device, dtype=dtype)
            ops.decode_attention(q, *pages, cache_seqlens=lengths, return_lse=True, **options)
            is_whole = not (is_e4m3 or softcap or num_splits)
            if device == "cuda" and seqlen_q == 1 and head_dim == 128 and is_whole:
                alone = {"block_table": table, "deterministic": "batch"}
                ops.decode_attention(q, *pages, cache_seqlens=lengths, **alone)
            new = {"k": q[:, :, :2], "v": q[:, :, 2:4], "cos": angles, "sin": angles}
            ops.decode_attention(q, *pages, cache_seqlens=lengths, **new, **options)
    for head_dim, seqlen_q, num_splits in itertools.product((40, 128), (1, 16), (0, 1, 3)):
        q = torch.randn(3, seqlen_q, 8, head_dim, device=device)
        pages = [torch.randn(120, 16, 2, head_dim, device=device) for _ in range(2)]
        options = {"num_splits": num_splits, "block_table": table, "cache_seqlens": lengths}
        ops.decode_attention(q, *pages, return_lse=True, window_size=(40, 0), **options)
        ops.decode_attention(q, *pages, k=q[:, :, :2], v=q[:, :, 2:4], **options)


def decode_bytes(device: str) -> None:
    """int8 with both scales, e4m3 with those of tokens; a tree's mask over each and over pages of
    16 and 32 bits."""
    lengths = torch.tensor([600, 16, 17], device=device, dtype=torch.int32)
    table = torch.arange(3 * 40, device=device, dtype=torch.int32).view(3, 40)
    sizes = itertools.product(DTYPES.values(), HEAD_DIMS, (1, 16), (0, 3))
    for dtype, head_dim, seqlen_q, num_splits in sizes:
        q = torch.randn(3, seqlen_q, 8, head_dim, device=device, dtype=dtype)
        mask = torch.arange(1, 1 + seqlen_q, device=device, dtype=torch.int32)
        options = {"block_table": table, "cache_seqlens": lengths, "num_splits": num_splits}
        for kind, of_tokens in ((None, False), *itertools.product(BYTES, (False, True))):
            if kind is not None and head_dim % 16:
                continue
            ones = torch.ones(120, 16, 2, head_dim, device=device)
            pages = [ones.to(kind or dtype) for _ in "kv"]
            size, end = ((120, 16, 2), "_cache") if of_tokens else ((2,), "")
            scale = torch.ones(size, device=device)
            more = {f"{x}_scale{end}": scale for x in "kv"} if kind is not None else {}
            for given in ({"softcap": 2.0}, {"tree_mask": mask}):
                ops.decode_attention(q, *pages, **options, **more, **given)
            if not of_tokens:
                more |= {"k": q[:, :, :2], "v": q[:, :, 2:4]}
                ops.decode_attention(q, *pages, **options, **more, tree_mask=mask.long())
        if head_dim <= 128:
            pages = [torch.ones(120, 16, 2, head_dim, device=device) for _ in "kv"]
            ops.decode_attention(q.float(), *pages, **options, tree_mask=mask)


def mla(device: str) -> None:
    """Few rows and several blocks of them, pages that the kernel for Hopper takes and others."""
    for dtype, page_size in itertools.product((torch.float16, torch.bfloat16), (1, 8, 64)):
        lengths = torch.tensor([200, -1, 65], device=device, dtype=torch.int32)
        count = -(-200 // page_size)
        table = torch.arange(3 * count, device=device, dtype=torch.int32).view(3, count)
        cache = torch.zeros(3 * count, page_size, 576, device=device, dtype=dtype)
        for heads, seqlen_q, num_splits in itertools.product((16, 70), (1, 2), (0, 1, 3)):
            q = torch.zeros(3, seqlen_q, heads, 576, device=device, dtype=dtype)
            ops.mla_decode(
                q, cache, cache_seqlens=lengths, block_table=table, softmax_scale=0.1,
                num_splits=num_splits, return_lse=True,
            )  # fmt: skip


CASES: tuple[Callable[[str], None], ...] = (
    forward, byte_caches, backward, decode, decode_bytes, mla,
)  # fmt: skip


def main() -> int:
    """Launch everything, wait, say what it was."""
    with torch.no_grad():
        for run in CASES:
            run("cuda")
        split.choice = decode_sm90.choice = True
        forget_all()
        forward("cuda")
        decode("cuda")
        hopper.is_enabled = hopper_backward.is_enabled = False
        forward("cuda")
        backward("cuda")
    torch.cuda.synchronize()
    print(f"launched {', '.join(run.__name__ for run in CASES)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
