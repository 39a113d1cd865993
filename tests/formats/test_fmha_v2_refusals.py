"""fmha_v2 calls that never reach the driver, each with what its message says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda
from fmha_calls import HEADS, TOTAL, array, kernel, paged, starts

from kernel_hub import Kernel
from kernel_hub.arrays.device_array import DeviceArray
from kernel_hub.errors import (
    CubinNotFoundError,
    CudaDriverError,
    LaunchConfigError,
    ParamsError,
    TensorError,
)
from kernel_hub.formats import fmha_v2
from kernel_hub.formats.fmha_v2.options import check_sinks


def refused(
    error: type[Exception], said: str, fields: dict[str, Any], *inputs: Any, **options: Any
) -> None:
    options.setdefault("cu_seqlens", starts(TOTAL))
    with pytest.raises(error) as caught:
        fmha_v2.run(kernel(**fields), *inputs, **options)
    assert said in str(caught.value), str(caught.value)


NL = {"mask": "causal", "variant": "nl"}
WS = {"mask": "causal", "variant": "tma_ws", "layout": "qkv"}
KV = {"layout": "q_kv", "variant": "tma_ws"}
PAGED = {"layout": "q_paged_kv", "variant": "tma_ws"}


def test_tensors_that_do_not_fit(fakecuda: FakeCuda) -> None:
    good = array(TOTAL, 3, HEADS, 128)
    for inputs, said in (
        ((), "0 tensors given; layout qkv takes one tensor"),
        ((good, good), "2 tensors given; layout qkv"),
        ((array(TOTAL, 3, HEADS, 64),), "qkv: expected shape (…, 3, …, 128), found fp16"),
        ((array(TOTAL, 3, HEADS, 128, dtype="bf16"),), "qkv: expected dtype fp16, found bf16"),
        ((array(TOTAL, 12, 128),), "or with num_kv_heads"),
        ((np.zeros((TOTAL, 3, HEADS, 128), np.float16),), "qkv: ndarray is on the CPU"),
        ((None,), "qkv: expected one tensor"),
        ((array(TOTAL, 3, HEADS, 256)[..., ::2],), "qkv: expected contiguous rows"),
        ((array(TOTAL, 3, 0, 128),), "num_kv_heads: expected a divisor of num_heads=0, found 0"),
    ):
        refused(TensorError, said, NL, *inputs)
    refused(TensorError, "expected a divisor of num_heads=4", NL, array(TOTAL, 10, 128),
            num_kv_heads=3)  # fmt: skip
    refused(TensorError, "num_heads: expected 4, as", NL, good, num_heads=2)
    odd = DeviceArray.from_address(good.ptr + 2, (4, 3, HEADS, 128), "fp16", 0, good)
    refused(TensorError, "qkv: expected rows of at least 3072 bytes", NL, odd)
    q, kv = array(TOTAL, HEADS, 32, dtype="bf16"), array(TOTAL, 2, HEADS, 32, dtype="bf16")
    refused(TensorError, "cu_seqlens_k: expected an int32 tensor", KV, q, kv[:40])
    refused(TensorError, "kv: expected two tensors", KV, q, q)
    refused(TensorError, "kv: expected something to attend to", KV, q, kv[:0])
    stats = array(TOTAL, HEADS, 2, dtype="fp32")
    refused(TensorError, "softmax_stats: expected the kernel's own softmax_scale, 0.176777", KV, q,
            kv, softmax_stats=stats, softmax_scale=0.25)  # fmt: skip
    q, pool, table = paged()
    refused(TensorError, "block_table: expected int32 (batch_size, 2, max_blocks)", PAGED, q, pool)
    refused(TensorError, "block_table: expected shape (1, 2, …), found int32 (2, 2, 3)", PAGED, q,
            pool, block_table=table)  # fmt: skip
    refused(TensorError, "block_table: expected None for layout qkv", NL, good, block_table=table)
    for shape, options, said in (
        ((1, 2, 0), {}, "max_blocks of at least 1"),
        ((1, 2, 3), {"max_seqlen_k": 97}, "max_blocks of at least 4, for 97 keys"),
        ((1, 2, 3), {"max_seqlen_k": "97"}, "max_seqlen_k: expected a positive int"),
    ):
        for fields in (PAGED, {**PAGED, "variant": "nl_tiled"}):
            scores = {} if fields is PAGED else {"softcap": 30.0}
            refused(TensorError, said, fields, q, pool, block_table=array(*shape, dtype="int32"),
                    **scores, **options)  # fmt: skip
    refused(TensorError, "power of two, found 24", PAGED, q, paged(24)[1], block_table=table)
    assert fakecuda.launch_count == 0


def test_a_malformed_array(fakecuda: FakeCuda) -> None:
    class Array:
        __cuda_array_interface__ = {"shape": (TOTAL, 3, HEADS, 128)}  # noqa: RUF012
        shape = (TOTAL, 3, HEADS, 128)

    refused(TensorError, "qkv: expected a CUDA tensor or array, found a Array whose", NL, Array())


def test_arguments_that_do_not_fit(fakecuda: FakeCuda) -> None:
    good = array(TOTAL, 3, HEADS, 128)
    stats, sinks = array(TOTAL, HEADS, 2, dtype="fp32"), array(HEADS)
    out = array(TOTAL, HEADS, 128)
    for fields, options, said in (
        (NL, {"cu_seqlens": array(3, dtype="int64")}, "cu_seqlens: expected dtype int32"),
        (NL, {"cu_seqlens": array(1, dtype="int32")}, "cu_seqlens: expected shape (batch_size + 1"),
        (NL, {"cu_seqlens": array(6, dtype="int32")[::2]}, "cu_seqlens: expected contiguous"),
        (NL, {"cu_seqlens": [0, TOTAL]}, "cu_seqlens: expected a CUDA tensor or array, found list"),
        (NL, {"cu_seqlens_k": starts(TOTAL)}, "cu_seqlens_k: expected None"),
        (NL, {"max_seqlen": 0}, "max_seqlen: expected a positive int, found 0"),
        (NL, {"max_seqlen": 3.0}, "max_seqlen: expected a positive int, found 3.0"),
        (NL, {"num_kv_heads": "4"}, "num_kv_heads: expected a positive int, found '4'"),
        (NL, {"unroll": True}, "unroll: expected a positive int, found True"),
        (NL, {"threads": 0}, "threads: expected a positive int, found 0"),
        (NL, {"threads": "128"}, "threads: expected a positive int, found '128'"),
        (NL, {"shared_bytes": -1}, "shared_bytes: expected an int of at least 0, found -1"),
        (NL, {"out": array(TOTAL, HEADS, 64)}, "out: expected shape (48, 4, 128)"),
        (NL, {"out": array(TOTAL, HEADS, 128, dtype="bf16")}, "out: expected dtype fp16"),
        (NL, {"attention_sinks": sinks}, "attention_sinks: expected dtype fp32, found fp16 (4,)"),
        (NL, {"softmax_stats": stats[:, :2]}, "softmax_stats: expected shape (48, 4, 2)"),
        (WS, {"softmax_stats": stats}, "softmax_stats: expected None, as the name has no _softmax"),
        (NL, {"packed_mask": stats}, "packed_mask: expected None, for the mask causal"),
        (NL, {"cu_mask_rows": stats}, "cu_mask_rows: expected None, for the mask causal"),
    ):
        refused(TensorError, said, fields, good, **options)
    for fields, options, said in (
        (NL, {"causal": False}, "take a kernel with no mask word in its name"),
        ({"mask": "padding", "variant": "nl"}, {"causal": True}, "with _causal in its name"),
        (NL, {"window_size": (3, 0)}, "window_size: "),
        (NL, {"window_size": 3}, "window_size=3: expected (left, 0)"),
        (NL, {"window_size": (3, 3)}, "window_size=(3, 3): expected (left, 0)"),
        (NL, {"window_size": {-1: 0, 0: 1}}, "expected (left, 0)"),
        (NL, {"window_size": iter((-1, -1))}, "expected (left, 0)"),
        (NL, {"chunk_size": 64}, "chunk_size: "),
        (NL, {"softcap": 3.0}, "without _softcapping"),
        (WS, {"alibi": True}, "has no ALiBi"),
        (
            {"mask": "padding", "variant": "nl"},
            {"alibi": True},
            "adds no ALiBi, only kernels with a",
        ),
        (NL, {"softmax_scale": math.nan}, "softmax_scale=nan: expected a finite number"),
        (NL, {"softmax_scale": "1"}, "softmax_scale='1'"),
        (NL, {"softmax_scale": 10**400}, "expected a finite number"),
        (NL, {"softmax_scale": 1e6}, "overflows the kernel's fp16"),
        (NL, {"q_scale": None}, "q_scale=None: expected a finite positive number"),
        (NL, {"q_scale": 2.0}, "only e4m3 kernels have scales"),
        (NL, {"shared_bytes": 10**6}, "sharedMemBytes"),
        (WS, {"max_seqlen": 2**31 - 1, "cu_seqlens": starts(*range(1, 99))}, "tiles of fmha_v2_"),
        (NL, {"threads": 96}, "threads=96: its blocks have 128"),
        (WS, {"threads": 128}, "threads=128: its blocks have 384"),
        (NL, {"shared_bytes": 32767}, "shared_bytes=32767: it takes 32768"),
        (WS, {"shared_bytes": 0}, "shared_bytes=0: it takes 232448"),
        (NL, {"unroll": 64}, "unroll=64: only kernels that are not flash attention"),
        (WS, {"unroll": 64}, "unroll=64: only kernels that are not flash attention"),
        (NL, {"causal": "no"}, "causal='no': expected True or False"),
        (NL, {"causal": 1}, "causal=1: expected True or False"),
        (NL, {"alibi": "yes"}, "alibi='yes': expected True or False"),
        (NL, {"alibi": None}, "alibi=None: expected True or False"),
        (NL, {"stream": "now"}, "stream='now' is no stream"),
    ):
        refused(LaunchConfigError, said, fields, good, out=out, **options)
    assert fakecuda.launch_count == 0


def test_options_of_other_kernels(fakecuda: FakeCuda) -> None:
    q, pool, table = paged()
    tiled = {"layout": "q_paged_kv", "variant": "nl_tiled"}
    lengths = {"cu_seqlens": starts(8, TOTAL), "cu_seqlens_k": starts(40, 120)}
    refused(LaunchConfigError, "with softcapping: it needs one", tiled, q, pool, **lengths)
    for softcap in (-1, 0, 0.5, 30.25, math.nan, math.inf, "30", True, 2**24 + 1, 10**400):
        refused(LaunchConfigError, f"softcap={softcap!r:.80}: expected a whole number", tiled, q,
                pool, block_table=table, softcap=softcap, **lengths)  # fmt: skip
    separate = {"layout": "q_k_v", "variant": "tma_ws"}
    q, v = array(TOTAL, HEADS, 192, dtype="bf16"), array(TOTAL, HEADS, 128, dtype="bf16")
    refused(LaunchConfigError, "always adds ALiBi", separate, q, q, v)
    sliding = {"mask": "sliding_or_chunked_causal", "variant": "nl"}
    qkv = array(TOTAL, 3, HEADS, 64)
    refused(LaunchConfigError, "only tma_ws kernels know chunks", sliding, qkv, chunk_size=64)
    custom = {"mask": "custom_mask", "layout": "q_kv"}
    q, kv = array(TOTAL, HEADS, 40, dtype="bf16"), array(TOTAL, 2, HEADS, 40, dtype="bf16")
    refused(TensorError, "packed_mask: expected what pack_mask made", custom, q, kv)
    mask = {"packed_mask": array(7, dtype="uint32"), "cu_mask_rows": starts(128)}
    refused(TensorError, "max_seqlen_k: expected what pack_mask was given", custom, q, kv, **mask)
    refused(TensorError, "packed_mask: expected a multiple of 128 rows of 32 bytes", custom, q, kv,
            max_seqlen_k=9, **mask)  # fmt: skip
    assert fakecuda.launch_count == 0


def test_factors_beyond_a_float(fakecuda: FakeCuda) -> None:
    qkv, given = array(TOTAL, 3, HEADS, 64, dtype="e4m3"), kernel(dtype="e4m3")
    packed, rows = fmha_v2.pack_mask(given, [np.ones((TOTAL, TOTAL), bool)], TOTAL)
    mask = {"packed_mask": DeviceArray.from_numpy(packed), "max_seqlen_k": TOTAL}
    mask["cu_mask_rows"] = DeviceArray.from_numpy(rows)
    for factors in (
        {"q_scale": 10**300, "k_scale": 10**300},
        {"v_scale": 1e300, "out_scale": 1e-9},
    ):
        refused(LaunchConfigError, "overflows", {"dtype": "e4m3"}, qkv, **mask, **factors)
    assert fakecuda.launch_count == 0


def test_other_kernels_and_gpus(make_fakecuda: Callable[..., FakeCuda]) -> None:
    fake = make_fakecuda()
    probe = Kernel("launch_probe").launch_probe_5
    with pytest.raises(ParamsError, match="a KernelFunction"):
        fmha_v2.run("causal", cu_seqlens=None)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="does not begin with fmha_v2_"):
        fmha_v2.run(probe, cu_seqlens=None)
    function = kernel(**NL)
    with pytest.raises(TypeError, match="cu_seqlens"):
        fmha_v2.run(function, array(TOTAL, 3, HEADS, 128))
    fake.set_capability(0, 8, 0)
    refused(CubinNotFoundError, "sm_90a code runs on exactly 9.0", NL, array(TOTAL, 3, HEADS, 128))
    assert fake.launch_count == 0


def test_a_failing_launch_says_so(fakecuda: FakeCuda) -> None:
    fakecuda.fail("cuLaunchKernelEx", 700, count=-1)
    with pytest.raises(CudaDriverError, match="fmha_v2_flash_attention_fp16_64_32"):
        fmha_v2.run(kernel(**NL), array(TOTAL, 3, HEADS, 128), cu_seqlens=starts(TOTAL))


def test_sinks_that_a_kernel_weighs_wrongly() -> None:
    """Measured on an H100: right with every sink lowered by 8 - ln 256."""
    for attributes, is_right in (
        ("causal_alibi_", False), ("causal_softcapping_", False),
        ("sliding_or_chunked_causal_softcapping_", False), ("causal_", True),
    ):  # fmt: skip
        for dtype in ("e4m3", "bf16"):
            text = (
                f"fmha_v2_flash_attention_{dtype}_64_256_S_qkv_128_{attributes}tma_ws_sm90_kernel"
            )
            name = fmha_v2.parse_name(text)
            if is_right or dtype == "bf16":
                check_sinks(name)
            else:
                with pytest.raises(LaunchConfigError, match="weighs a sink e\\^8 / 256"):
                    check_sinks(name)
