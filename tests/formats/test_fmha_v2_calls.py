"""fmha_v2 calls on the stand-in driver: what arrives at a launch.

The kernels are those of tests/gpu/fmha_stand_in.cu, which compute attention from the same struct.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda
from fmha_calls import HEADS, TOTAL, array, arrived, float_bits, half2, kernel, paged, starts

from kernel_hub.arrays.device_array import DeviceArray
from kernel_hub.arrays.tensor_map import TensorMap
from kernel_hub.errors import ParamsError, TensorError
from kernel_hub.formats import fmha_v2
from kernel_hub.formats.fmha_v2 import Params

NO_WINDOW = 2**31 - 1


def test_packed_nl(fakecuda: FakeCuda) -> None:
    qkv, lengths = array(TOTAL, 3, HEADS, 128), starts(20, 20, TOTAL)
    function = kernel(mask="causal", variant="nl")
    out = fmha_v2.run(function, qkv, cu_seqlens=lengths, max_seqlen=70, causal=True)
    assert isinstance(out, DeviceArray)
    assert (out.shape, out.dtype_token) == ((TOTAL, HEADS, 128), "fp16")
    launch = fakecuda.launch()
    assert launch.name == function.name
    assert (launch.gridDim, launch.blockDim) == ((2, HEADS, 3), (128, 1, 1))
    assert launch.sharedMemBytes == 32768
    expected = Params(
        qkv=qkv.ptr,
        out=out.ptr,
        out_stride=HEADS * 256,
        batch_size=3,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        num_heads_per_kv=1,
        max_seqlen_q=70,
        softmax_stats_stride=8 * HEADS,
        head_dim=128,
        head_dim_v=128,
        num_grouped_heads=1,
        sliding_window_size=2**31 - 1,
        scale_bmm1=half2(128**-0.5),
        scale_softmax=half2(1.0),
        scale_bmm2=half2(1.0),
        cu_seqlens_q=lengths.ptr,
        cu_seqlens_k=lengths.ptr,
        **dict.fromkeys(("q_stride", "k_stride", "v_stride"), 3 * HEADS * 256),
    )
    assert bytes(arrived(fakecuda)) == bytes(expected)


def test_alibi_stats_and_rows_with_gaps(fakecuda: FakeCuda) -> None:
    wide, out = array(TOTAL, 10, 128), array(TOTAL, 8, 128)
    stats = array(TOTAL, 7, 2, dtype="fp32")
    given = fmha_v2.run(
        kernel(mask="causal", variant="nl"),
        wide[:, 1:],
        cu_seqlens=starts(TOTAL),
        num_kv_heads=1,
        alibi=True,
        softmax_stats=stats,
        softmax_scale=0.25,
        out=out[:, :7],
    )
    assert given.ptr == out.ptr
    params = arrived(fakecuda)
    assert (params.num_heads, params.num_kv_heads, params.num_heads_per_kv) == (7, 1, 7)
    assert params.qkv == wide.ptr + 256
    assert (params.q_stride, params.v_stride, params.out_stride) == (2560, 2560, 2048)
    assert params.softmax_stats == stats.ptr
    assert params.softmax_stats_stride == 8 * 7
    assert params.has_alibi
    alibi = params.alibi
    assert (alibi.num_heads_pow2, alibi.neg4_div_num_heads, alibi.scale_after_alibi) == (4, -1, 1)
    assert params.scale_bmm1 == half2(0.25)


def test_window(fakecuda: FakeCuda) -> None:
    function = kernel(mask="sliding_or_chunked_causal", variant="nl")
    call = functools.partial(fmha_v2.run, function, array(TOTAL, 3, HEADS, 64), causal=True)
    call(cu_seqlens=starts(TOTAL), window_size=(16, 0))
    params = arrived(fakecuda)
    assert params.sliding_window_size == 17
    # fp16 with fp32 accumulation: floats.
    assert (params.scale_bmm1, params.scale_bmm2) == (float_bits(0.125), float_bits(1.0))
    call(cu_seqlens=starts(TOTAL))
    assert arrived(fakecuda).sliding_window_size == NO_WINDOW
    assert fakecuda.launch().gridDim == (1, HEADS, 1)  # max_seqlen: all 48 rows are one step


def test_separate_tiled_with_another_head_dim_of_v(fakecuda: FakeCuda) -> None:
    q, k = array(TOTAL, HEADS, 192, dtype="bf16"), array(80, 2, 192, dtype="bf16")
    v, lengths = array(80, 3, 128, dtype="bf16")[:, :2], (starts(10, TOTAL), starts(20, 80))
    function = kernel(layout="q_k_v", variant="nl_tiled")
    out = fmha_v2.run(function, q, k, v, cu_seqlens=lengths[0], cu_seqlens_k=lengths[1])
    launch, params = fakecuda.launch(), arrived(fakecuda)
    assert (launch.gridDim, launch.sharedMemBytes) == ((1, HEADS, 2), 81920)
    assert out.shape == (TOTAL, HEADS, 128)
    assert (params.q, params.k, params.v) == (q.ptr, k.ptr, v.ptr)
    assert (params.q_stride, params.k_stride, params.v_stride) == (HEADS * 384, 768, 768)
    assert (params.head_dim, params.head_dim_v, params.out_stride) == (192, 128, HEADS * 256)
    assert (params.cu_seqlens_q, params.cu_seqlens_k) == (lengths[0].ptr, lengths[1].ptr)
    assert params.scale_bmm1 == float_bits(192**-0.5)


def test_custom_mask(fakecuda: FakeCuda) -> None:
    masks = [np.ones((20, 20), bool), np.eye(28, dtype=bool)]
    function = kernel(mask="custom_mask", layout="q_kv")
    packed, rows = (DeviceArray.from_numpy(a) for a in fmha_v2.pack_mask(function, masks, 28))
    q, kv = array(TOTAL, HEADS, 40, dtype="bf16"), array(TOTAL, 2, 1, 40, dtype="bf16")
    fmha_v2.run(
        function, q, kv, cu_seqlens=starts(20, TOTAL), packed_mask=packed, cu_mask_rows=rows,
        max_seqlen_k=28,
    )  # fmt: skip
    params = arrived(fakecuda)
    assert (params.kv, params.k_stride, params.v_stride) == (kv.ptr, 160, 160)
    assert (params.packed_mask, params.cu_mask_rows) == (packed.ptr, rows.ptr)
    assert params.packed_mask_stride == 32
    assert fakecuda.launch().sharedMemBytes == 16384  # head_dim 40 takes the room of 64


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (70, 199), (128, 256), (129, 300)])
def test_pack_mask(rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows)
    masks = [rng.random((5, 7)) < 0.5, rng.random((rows, columns)) < 0.5]
    through_tma = kernel(mask="custom_mask", variant="tma_ws")
    packed, starts_of_rows = fmha_v2.pack_mask(through_tma, masks, columns + 8)
    assert starts_of_rows.tolist() == [0, 128, 128 + -(-rows // 128) * 128]
    padded_columns = -(-(columns + 8) // 256) * 256
    assert packed.size * 32 == starts_of_rows[-1] * padded_columns
    tiles = packed.reshape(-1, padded_columns // 64, 128)

    def bit(row: int, col: int) -> int:
        r, c = row % 64, col % 64
        thread = 32 * (r // 16) + 4 * (r % 8) + c % 8 // 2
        place = 4 * (c // 8) + 2 * (r % 16 // 8) + c % 2
        return int(tiles[row // 64, col // 64, thread] >> place) & 1

    for row, col in {(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3)}:
        assert bit(128 + row, col) == masks[1][row, col]
    assert int(np.unpackbits(packed.view(np.uint8)).sum()) == sum(int(mask.sum()) for mask in masks)
    with pytest.raises(TensorError, match=r"masks\[0\]: expected bool"):
        fmha_v2.pack_mask(through_tma, [np.ones((4, 4))], 4)
    with pytest.raises(TensorError, match="at most 3"):
        fmha_v2.pack_mask(through_tma, [np.ones((4, 4), bool)], 3)


def test_pack_mask_of_other_arguments() -> None:
    name = fmha_v2.parse_name(kernel(mask="custom_mask", variant="tma_ws").name)
    good: Any = [np.ones((2, 2), bool)]
    for given, masks, longest, said in (
        *((other, good, 2, "kernel=") for other in (None, 5, str(name))),
        (name, None, 2, "masks=None: a boolean array for each sequence"),
        (name, [[[True], [True, False]]], 2, r"masks\[0\]: expected a boolean array"),
        (name, [None], 2, r"masks\[0\]: expected bool"),
        *((name, good, longest, "max_seqlen_k=") for longest in ("2", 2.0, 0, -1, None, 2**40)),
        (name, good, 2**31 - 1, "are more than the 2 GiB packed here"),
    ):
        with pytest.raises((ParamsError, TensorError), match=said):
            fmha_v2.pack_mask(given, masks, longest)
    packed, _ = fmha_v2.pack_mask(name, good, 2**18)  # the rest of the columns costs little
    assert (packed.size, np.count_nonzero(packed)) == (128 * 2**18 // 32, 2)


def test_masks_that_a_kernel_does_not_read_whole() -> None:
    """kv_step 32: the block of queries 64 to 127 of 100 begins to look at key 64 + 60."""
    name = fmha_v2.parse_name(kernel(mask="custom_mask", variant="nl").name)
    mask = np.ones((100, 160), bool)
    mask[64:, 96:] = mask[:64, 32:] = False
    fmha_v2.pack_mask(name, [mask], 160)
    mask[70, 95] = False
    with pytest.raises(TensorError) as caught:
        fmha_v2.pack_mask(name, [mask[:, :1], mask], 160)
    assert "masks[1] hides key 95 from query 70" in str(caught.value)
    assert "of queries 64 to 99 from key 96 on" in str(caught.value)


# -- paged, and through the TMA


def test_paged_tiled_with_softcapping(fakecuda: FakeCuda) -> None:
    q, pool, table = paged()
    function = kernel(layout="q_paged_kv", variant="nl_tiled")
    lengths = {"cu_seqlens": starts(8, TOTAL), "cu_seqlens_k": starts(40, 120)}
    fmha_v2.run(function, q, pool, block_table=table, softcap=30.0, **lengths)
    params, cache = arrived(fakecuda), arrived(fakecuda).paged
    block_bytes = 2 * 32 * 256
    assert (cache.max_seqs, cache.max_blocks_per_seq) == (2, 3)
    assert (cache.tokens_per_block, cache.tokens_per_block_log2) == (32, 5)
    assert (cache.bytes_per_block, cache.pool, cache.block_offsets) == (
        *(block_bytes, pool.ptr),
        table.ptr,
    )
    assert (params.k_stride, params.v_stride) == (32 * 256, 32 * 256)
    assert params.softcap == 30  # the kernels convert an unsigned integer
    assert params.scale_bmm1 == float_bits(128**-0.5 / 30.0)


def map_of(tensor: DeviceArray, box: tuple[int, ...], address: int, **view: Any) -> bytes:
    base = DeviceArray.from_address(address, view["shape"], tensor.dtype_token)
    made = TensorMap.tiled(base, box, swizzle="128B", l2_promotion="none", **view)
    return made.raw[:64]


def test_tma_packed(fakecuda: FakeCuda) -> None:
    qkv, lengths = array(TOTAL, HEADS + 4, 128), starts(20, TOTAL)
    function = kernel(mask="causal", variant="tma_ws", layout="qkv")
    call = {"cu_seqlens": lengths, "num_kv_heads": 2, "max_seqlen": 300}
    sinks = array(HEADS, dtype="fp32")
    fmha_v2.run(function, qkv, attention_sinks=sinks, **call)
    launch, params = fakecuda.launch(), arrived(fakecuda)
    assert params.attention_sinks == sinks.ptr
    tiles = -(-300 // 128)
    assert (launch.gridDim, launch.blockDim) == ((1, tiles * HEADS * 2, 1), (384, 1, 1))
    assert launch.sharedMemBytes == 227 * 1024
    assert (params.num_tiles_per_head, params.num_tiles) == (tiles, tiles * HEADS * 2)
    assert params.balanced
    assert params.tile_counter
    # fp16 accumulation, yet the scores' factor is a float, in base 2.
    assert params.scale_bmm1 == float_bits(128**-0.5 * math.log2(math.e))
    assert (params.scale_softmax, params.scale_bmm2) == (half2(1.0), half2(1.0))
    row, strides = (HEADS + 4) * 128, ((HEADS + 4) * 128, 128, 1)
    assert params.q_stride == 2 * row
    for part, first, heads, rows in (
        ("q", 0, HEADS, 64),
        ("k", HEADS, 2, 128),
        ("v", HEADS + 2, 2, 128),
    ):
        expected = map_of(
            qkv,
            (rows, 1, 64),
            qkv.ptr + 2 * 128 * first,
            shape=(TOTAL, heads, 128),
            strides=strides,
        )
        assert bytes(getattr(params, f"tma_{part}")) == expected, part
    assert not any(params.tma_out)
    fakecuda.set_device_attribute(0, 16, 5)  # multiprocessors
    fmha_v2.run(function, qkv, **call)
    assert fakecuda.launch().gridDim in ((1, 5, 1), (1, tiles * HEADS * 2, 1))


@pytest.mark.parametrize("page_size", [32, 256])
def test_tma_paged(fakecuda: FakeCuda, page_size: int) -> None:
    q, pool, table = paged(page_size)
    function = kernel(layout="q_paged_kv", variant="tma_ws")
    lengths = {"cu_seqlens": starts(8, TOTAL), "cu_seqlens_k": starts(40, 120)}
    fmha_v2.run(function, q, pool, block_table=table, **lengths)
    params = arrived(fakecuda)
    blocks = max(1, 128 // page_size)
    assert params.blocks_per_tma_load == blocks
    assert 1 << params.blocks_per_tma_load_log2 == blocks
    assert not params.balanced
    strides = (2 * page_size * 128, page_size * 128, 128, 1)
    box = (1, 1, min(page_size, 128), 64)
    expected = map_of(pool, box, pool.ptr, shape=(12, 2, page_size, 128), strides=strides)
    assert bytes(params.tma_k) == bytes(params.tma_v) == expected


def test_tma_alibi_and_chunks(fakecuda: FakeCuda) -> None:
    function = kernel(layout="q_k_v", variant="tma_ws")
    q, k = array(TOTAL, HEADS, 192, dtype="bf16"), array(TOTAL, 2, 192, dtype="bf16")
    v = array(TOTAL, 2, 128, dtype="bf16")
    fmha_v2.run(function, q, k, v, cu_seqlens=starts(TOTAL), alibi=True)
    assert arrived(fakecuda).scale_bmm1 == float_bits(192**-0.5)  # with a bias: base e
    function = kernel(mask="sliding_or_chunked_causal", variant="tma_ws")
    inputs = array(TOTAL, HEADS, 32, dtype="bf16"), array(TOTAL, 2, HEADS, 32, dtype="bf16")
    stats = array(TOTAL, HEADS, 2, dtype="fp32")
    options = {"cu_seqlens": starts(TOTAL), "softmax_stats": stats}
    fmha_v2.run(function, *inputs, chunk_size=64, **options)
    params = arrived(fakecuda)
    assert (params.log2_chunk_size, params.sliding_window_size) == (6, NO_WINDOW)
    assert params.softmax_stats == stats.ptr
    fmha_v2.run(function, *inputs, cu_seqlens=starts(TOTAL), softmax_scale=0.5)
    assert arrived(fakecuda).softmax_stats not in (0, stats.ptr)  # the kernel writes them anyway


def test_e4m3_reads_its_scales_on_the_device(fakecuda: FakeCuda) -> None:
    function = kernel(dtype="e4m3")
    qkv = array(TOTAL, 3, HEADS, 64, dtype="e4m3")
    packed, rows = fmha_v2.pack_mask(function, [np.ones((TOTAL, TOTAL), bool)], TOTAL)
    mask = {"packed_mask": DeviceArray.from_numpy(packed), "max_seqlen_k": TOTAL}
    mask["cu_mask_rows"] = DeviceArray.from_numpy(rows)
    plan = fmha_v2.plan(
        function, qkv, cu_seqlens=starts(TOTAL), q_scale=0.5, k_scale=4.0, v_scale=3.0,
        out_scale=1.5, **mask,
    )  # fmt: skip
    assert plan.out.dtype_token == "e4m3"
    params = plan.params
    assert params.scale_bmm2_on_device == params.scale_bmm1_on_device + 4
    held = DeviceArray.from_address(params.scale_bmm1_on_device, 2, "fp32").to_numpy()
    np.testing.assert_allclose(held, [0.125 * 2 * math.log2(math.e), 2.0], rtol=1e-6)
    assert any(params.tma_out)


def test_a_plan_repeats(fakecuda: FakeCuda) -> None:
    plan = fmha_v2.plan(
        kernel(mask="causal", variant="tma_ws", layout="qkv"),
        array(TOTAL, 3, HEADS, 128),
        cu_seqlens=starts(TOTAL),
    )
    assert fakecuda.launch_count == 0
    before = fakecuda.calls("cuMemsetD8Async")
    assert plan() is plan() is plan.out
    assert fakecuda.launch_count == 2
    assert fakecuda.calls("cuMemsetD8Async") == before + 2  # the tile counter starts at 0
    assert fakecuda.launch(0).params == fakecuda.launch(1).params
    assert (plan.gridDim, plan.blockDim) == ((1, HEADS, 1), 384)


def test_nothing_to_do(fakecuda: FakeCuda) -> None:
    for fields in ({"variant": "nl"}, {"variant": "tma_ws", "layout": "qkv"}):
        function = kernel(mask="causal", **fields)
        out = fmha_v2.run(function, array(0, 3, HEADS, 128), cu_seqlens=starts(0))
        assert out.shape == (0, HEADS, 128)
    assert fakecuda.launch_count == 0


def test_on_the_tensors_own_device(make_fakecuda: Callable[..., FakeCuda]) -> None:
    fake = make_fakecuda(devices=2)
    qkv = DeviceArray.zeros((TOTAL, 3, HEADS, 128), "fp16", device=1)
    lengths = DeviceArray.from_numpy(np.array([0, TOTAL], np.int32), device=1)
    function = kernel(mask="causal", variant="nl")
    assert fmha_v2.run(function, qkv, cu_seqlens=lengths).device == 1
    assert fake.launch().device == 1
    elsewhere = DeviceArray.from_numpy(np.array([0, TOTAL], np.int32), device=0)
    with pytest.raises(TensorError, match="cu_seqlens: expected device 1, found device 0"):
        fmha_v2.run(function, qkv, cu_seqlens=elsewhere)
