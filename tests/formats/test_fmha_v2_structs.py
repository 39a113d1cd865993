"""The structs of fmha_v2 kernels: where fields are, and filling them."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda
from fmha_calls import (
    CUBIN,
    FILES,
    HEADS,
    TOTAL,
    array,
    arrived,
    changed,
    float_bits,
    half2,
    load,
    starts,
)

from kernel_hub import Kernel, KernelFunction
from kernel_hub.arrays.device_array import DeviceArray
from kernel_hub.errors import LaunchConfigError
from kernel_hub.formats import fmha_v2
from kernel_hub.formats.fmha_v2 import param_struct, struct_layouts

# Offsets of the fields as a C++ compiler gives them for the structs in the headers of
# TensorRT-LLM (Edge: TensorRT-Edge-LLM) that the kernels were built with.
OFFSETS: dict[str, tuple[int, str]] = {
    "Params": (
        704,
        """
    qkv 0 q 8 k 16 v 24 kv 32 paged 40 packed_mask 80 attention_sinks 88 out 96 softmax_stats 104
    q_stride 112 k_stride 120 v_stride 128 packed_mask_stride 136 out_stride 144
    softmax_stats_stride 152 tma_q 192 tma_k 256 tma_v 320 tma_out 384 blocks_per_tma_load 448
    blocks_per_tma_load_log2 452 batch_size 456 num_heads 460 num_kv_heads 464 num_heads_per_kv 468
    max_seqlen_q 472 head_dim 476 head_dim_v 480 num_grouped_heads 484 sliding_window_size 488
    log2_chunk_size 492 scale_bmm1 496 softcap 500 scale_softmax 504 scale_bmm2 508
    scale_bmm1_on_device 512 scale_bmm2_on_device 520 cu_seqlens_q 528 cu_seqlens_k 536
    cu_mask_rows 544 has_alibi 552 alibi 556 tile_counter 576 num_tiles 584 num_tiles_per_head 588
    balanced 592 is_padded 593 sage_q 600 sage_k 616 sage_v 632""",
    ),
    "ParamsWithoutSinks": (
        704,
        """packed_mask 80 out 88 softmax_stats 96 q_stride 104 k_stride 112 v_stride 120
    out_stride 136 tma_out 384 batch_size 456 max_seqlen_q 472 head_dim_v 480 scale_bmm1 496
    softcap 500 cu_seqlens_q 528 cu_mask_rows 544 alibi 556 is_padded 593 sage_q 600""",
    ),
    "EdgeParams": (
        704,
        """packed_mask 80 out 96 softmax_stats 104 q_stride 112 k_stride 120 v_stride 128
    out_stride 144 tma_out 384 batch_size 456 max_seqlen_q 472 head_dim 480 head_dim_v 484
    sliding_window_size 492 scale_bmm1 500 softcap 504 scale_bmm1_on_device 520 cu_seqlens_q 536
    cu_mask_rows 552 alibi 564 tile_counter 584 is_padded 601 sage_q 608""",
    ),
    "Params640": (
        640,
        """packed_mask 64 out 72 softmax_stats 80 qkv_stride 88 q_stride 96 kv_stride 104
    v_stride 112 out_stride 128 tma_out 320 batch_size 392 max_seqlen_q 408 head_dim 412
    head_dim_v 416 sliding_window_size 424 scale_bmm1 432 softcap 436 scale_bmm1_on_device 448
    cu_seqlens_q 464 cu_mask_rows 480 alibi 492 tile_counter 512 is_padded 529 sage_q 536""",
    ),
    "Params576": (
        576,
        """packed_mask 64 out 72 softmax_stats 80 qkv_stride 88 kv_stride 104 out_stride 128
    batch_size 392 head_dim_v 416 sliding_window_size 420 scale_bmm1 424 softcap 428
    scale_bmm1_on_device 440 cu_seqlens_q 456 cu_mask_rows 472 alibi 484 tile_counter 504
    is_padded 521 sage_q 528""",
    ),
    "Params512": (
        512,
        """qkv 0 q 8 kv 16 paged 24 packed_mask 64 out 72 qkv_stride 80 q_stride 88
    kv_stride 96 packed_mask_stride 104 out_stride 112 tma_q 128 tma_kv 192 tma_out 256
    blocks_per_tma_load 320 batch_size 328 num_heads 332 num_kv_heads 336 num_heads_per_kv 340
    max_seqlen_q 344 head_dim 348 sliding_window_size 352 scale_bmm1 356 softcap 360
    scale_softmax 364 scale_bmm2 368 scale_bmm1_on_device 376 scale_bmm2_on_device 384
    cu_seqlens_q 392 cu_seqlens_k 400 cu_mask_rows 408 has_alibi 416 alibi 420 tile_counter 440
    num_tiles 448 num_tiles_per_head 452 balanced 456 is_padded 457 head_dim_v 460 v_stride 464""",
    ),
    "LongParams512": (640, "qkv 0 out 72 cu_seqlens_q 392 is_padded 457 head_dim_v 460"),
}
PARTS = {
    "PagedCache": """max_seqs 0 max_blocks_per_seq 4 tokens_per_block 8 tokens_per_block_log2 12
    bytes_per_block 16 pool 24 block_offsets 32""",
    "Alibi": """num_heads_pow2 0 neg4_div_num_heads 4 scale_after_alibi 8 head_idx_offset 12
    sequence_pos_offset 16""",
    "SageScales": "max_num_blocks 0 scales 8",
}
OLD = ["640", "576", "long_512", "512"]
DIM = 128


def offsets(text: str) -> dict[str, int]:
    words = text.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


@pytest.mark.parametrize("struct", OFFSETS)
def test_where_fields_are(struct: str) -> None:
    made, (size, text) = getattr(param_struct, struct), OFFSETS[struct]
    assert ctypes.sizeof(made) == size
    assert {name: getattr(made, name).offset for name in offsets(text)} == offsets(text)
    if struct == "Params":
        assert [name for name, _ in made._fields_ if name[0] != "_"] == list(offsets(text))


@pytest.mark.parametrize("struct", PARTS)
def test_where_parts_fields_are(struct: str) -> None:
    made = getattr(param_struct, struct)
    assert {name: getattr(made, name).offset for name, _ in made._fields_} == offsets(PARTS[struct])


def run(function: KernelFunction, *inputs: Any, **options: Any) -> Any:
    return fmha_v2.run(function, *inputs, cu_seqlens=starts(20, TOTAL), **options)


# -- older structs, filled


@pytest.mark.parametrize("file", OLD)
def test_packed_qkv(fakecuda: FakeCuda, file: str) -> None:
    struct = getattr(param_struct, FILES[file])
    qkv, lengths = array(TOTAL, HEADS + 2, DIM), starts(20, TOTAL)
    function = load(file, mask="causal", variant="nl")
    out = fmha_v2.run(function, qkv, cu_seqlens=lengths, num_kv_heads=1, softmax_scale=0.25)
    expected = struct()
    values: dict[str, Any] = {
        "qkv": qkv.ptr,
        "out": out.ptr,
        "out_stride": HEADS * DIM * 2,
        **dict.fromkeys(("qkv_stride", "q_stride", "kv_stride", "v_stride"), (HEADS + 2) * DIM * 2),
        "batch_size": 2,
        **dict.fromkeys(("num_heads", "num_heads_per_kv"), HEADS),
        "num_kv_heads": 1,
        "max_seqlen_q": TOTAL,
        **dict.fromkeys(("head_dim", "head_dim_v"), DIM),
        "sliding_window_size": 2**31 - 1,
        "scale_bmm1": half2(0.25),
        **dict.fromkeys(("scale_softmax", "scale_bmm2"), half2(1.0)),
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), lengths.ptr),
    }
    if file in ("640", "576"):
        values["softmax_stats_stride"] = 8 * HEADS
    if file == "640":
        values["num_grouped_heads"] = 1
    for field, value in values.items():
        setattr(expected, field, value)
    assert bytes(arrived(fakecuda, struct)) == bytes(expected)


@pytest.mark.parametrize("file", OLD)
def test_masks_alibi_pages_and_softcapping(fakecuda: FakeCuda, file: str) -> None:
    come = functools.partial(arrived, fakecuda, getattr(param_struct, FILES[file]))
    sliding = load(file, mask="sliding_window_causal", layout="qkv")
    packed = array(TOTAL, HEADS * (192 + 192 + 128), dtype="bf16")
    heads = {"num_heads": HEADS, "num_kv_heads": HEADS}
    if knows_windows := "512" in FILES[file]:
        run(sliding, packed, window_size=(16, 0), alibi=True, causal=True, **heads)
    else:
        with pytest.raises(LaunchConfigError, match=r"window_size: .*holds a row's own key"):
            run(sliding, packed, window_size=(16, 0), **heads)
        run(sliding, packed, alibi=True, causal=True, **heads)
    params = come()
    assert params.sliding_window_size == (16 if knows_windows else 2**31 - 1)
    assert params.has_alibi
    assert (params.alibi.num_heads_pow2, params.alibi.neg4_div_num_heads) == (HEADS, -4 / HEADS)
    assert (params.head_dim, params.head_dim_v) == (192, 128)
    assert params.qkv_stride == HEADS * 512 * 2

    masked = load(file, mask="custom_mask")
    masks = [np.ones((20, 20), bool), np.ones((28, 28), bool)]
    words, rows = (DeviceArray.from_numpy(a) for a in fmha_v2.pack_mask(masked, masks, 28))
    qkv = array(TOTAL, 3, HEADS, DIM, dtype="bf16")
    run(masked, qkv, packed_mask=words, cu_mask_rows=rows, max_seqlen_k=28)
    params = come()
    assert (params.packed_mask, params.packed_mask_stride) == (words.ptr, 32)
    assert params.cu_mask_rows == rows.ptr

    paged = load(file, layout="q_paged_kv", mask="causal")
    q, pool = array(TOTAL, HEADS, DIM, dtype="bf16"), array(12, 2, 32, DIM, dtype="bf16")
    table = array(2, 2, 3, dtype="int32")
    run(paged, q, pool, cu_seqlens_k=starts(40, 90), block_table=table, softcap=50)
    params = come()
    assert (params.q, params.q_stride) == (q.ptr, HEADS * DIM * 2)
    assert (params.kv_stride, params.v_stride) == (32 * DIM * 2, 32 * DIM * 2)
    assert (params.paged.pool, params.paged.block_offsets) == (pool.ptr, table.ptr)
    assert (params.softcap, params.scale_bmm1) == (50, float_bits(DIM**-0.5 / 50))


def test_options_that_a_kernel_does_not_read(fakecuda: FakeCuda) -> None:
    """As TensorRT-LLM's of 2025: only tma_ws kernels read sinks; others took them for nothing."""
    qkv, sinks = array(TOTAL, 3, HEADS, DIM), array(HEADS, dtype="fp32")
    function = load("stand_in", mask="causal", variant="nl")
    with pytest.raises(
        LaunchConfigError, match=r"attention_sinks: .*_nl is a kernel that does not"
    ):
        run(function, qkv, attention_sinks=sinks)
    image, name = CUBIN.read_bytes(), function.name
    for option, given in (
        ("softmax_stats", {"softmax_stats": array(TOTAL, HEADS, 2, dtype="fp32")}),
        ("alibi", {"alibi": True}),
    ):
        field, _ = struct_layouts._OPTIONS[option]
        old = getattr(param_struct.Params, field).offset
        other = Kernel(changed(image, name, 704, old, param_struct.Params.out.offset))[name]
        with pytest.raises(LaunchConfigError, match=rf"{option}: .* does not read it"):
            run(other, qkv, **given)
        run(other, qkv)
    assert fakecuda.launch_count == 2


@pytest.mark.parametrize("file", OLD)
def test_what_older_structs_cannot_say(fakecuda: FakeCuda, file: str) -> None:
    function, qkv = load(file, mask="causal", variant="nl"), array(TOTAL, 3, HEADS, DIM)
    said = r"attention_sinks: fmha_v2.* is of TensorRT-LLM .* which has no such parameter"
    with pytest.raises(LaunchConfigError, match=said):
        run(function, qkv, attention_sinks=array(HEADS, dtype="fp32"))
    with pytest.raises(LaunchConfigError, match="only tma_ws kernels know chunks"):
        run(load(file, mask="sliding_window_causal", layout="qkv"),
            array(TOTAL, 2048, dtype="bf16"), num_heads=4, num_kv_heads=4,
            chunk_size=64)  # fmt: skip
    q, kv = array(TOTAL, HEADS, 64, dtype="bf16"), array(TOTAL, 2, HEADS, 64, dtype="bf16")
    with pytest.raises(LaunchConfigError, match="tma_ws kernels and q_kv layout are not known"):
        run(load(file, layout="q_kv"), q, kv)
    stats = array(TOTAL, HEADS, 2, dtype="fp32")
    if "512" in file:
        with pytest.raises(LaunchConfigError, match=r"softmax_stats: .*no such parameter"):
            run(function, qkv, softmax_stats=stats)
        assert fakecuda.launch_count == 0
    else:
        run(function, qkv, softmax_stats=stats)
        struct = getattr(param_struct, FILES[file])
        assert arrived(fakecuda, struct).softmax_stats == stats.ptr


@pytest.mark.parametrize("file", OLD)
def test_a_window_over_pages(fakecuda: FakeCuda, file: str) -> None:
    """Kernels of 0.16 find key r in row r % window of the blocks, once there are more."""
    function = load(file, layout="q_paged_kv", mask="sliding_window_causal")
    q, pool = array(TOTAL, HEADS, 64, dtype="bf16"), array(12, 2, 32, 64, dtype="bf16")
    pages = {"cu_seqlens_k": starts(40, 90), "block_table": array(2, 2, 3, dtype="int32")}
    with pytest.raises(LaunchConfigError, match=r"window_size: .*a ring of the window's size"):
        run(function, q, pool, window_size=(16, 0), **pages)
    assert fakecuda.launch_count == 0
    run(function, q, pool, **pages)
    params = arrived(fakecuda, getattr(param_struct, FILES[file]))
    assert params.sliding_window_size == 2**31 - 1


@pytest.mark.parametrize("file", FILES)
def test_fewer_heads_of_k_than_of_q_in_rows_of_two_sizes(fakecuda: FakeCuda, file: str) -> None:
    """Kernels of 0.16 assert that there are none such, which would end the process's context."""
    function = load(file, layout="qkv", head_dim=192)
    heads: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": 2}
    rows = array(TOTAL, HEADS * 192 + 2 * (192 + 128), dtype="bf16")
    if file == "stand_in":  # without an assertion, as TensorRT-LLM's of September 2025
        run(function, rows, **heads)
        params = arrived(fakecuda)
        assert (params.num_heads, params.num_kv_heads, params.num_heads_per_kv) == (HEADS, 2, 2)
        return
    said = (
        r"num_kv_heads=2: fmha_v2\S*192x128\S* is of TensorRT-LLM .*, whose kernels with two head "
        "sizes take as many heads of K and V as of Q, 4, and stop themselves at fewer: repeat"
    )
    with pytest.raises(LaunchConfigError, match=said):
        run(function, rows, **heads)
    assert fakecuda.launch_count == 0
    run(function, array(TOTAL, HEADS * 512, dtype="bf16"), num_heads=HEADS, num_kv_heads=HEADS)
    one_size = load(file, layout="qkv", mask="causal", variant="nl")
    run(one_size, array(TOTAL, HEADS + 2, DIM), num_kv_heads=1)
    assert fakecuda.launch_count == 2


def test_without_sinks(fakecuda: FakeCuda) -> None:
    function, qkv = load("without_sinks", mask="causal", variant="nl"), array(TOTAL, 3, HEADS, DIM)
    out = run(function, qkv)
    params = arrived(fakecuda, param_struct.ParamsWithoutSinks)
    assert (params.qkv, params.out, params.out_stride) == (qkv.ptr, out.ptr, HEADS * DIM * 2)
    with pytest.raises(LaunchConfigError, match=r"attention_sinks: .*no such parameter"):
        run(function, qkv, attention_sinks=array(HEADS, dtype="fp32"))
    through_tma = load("without_sinks", mask="causal", variant="tma_ws", layout="qkv")
    plan = fmha_v2.plan(through_tma, qkv, cu_seqlens=starts(20, TOTAL))
    assert isinstance(plan.params, param_struct.ParamsWithoutSinks)
    assert plan.params.tile_counter and plan.params.num_tiles == 2 * HEADS
    assert any(plan.params.tma_q)
