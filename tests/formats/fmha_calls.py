"""What the tests of fmha_v2 calls share: the stand-in kernels, arrays, and the struct that came."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from fakecuda import FakeCuda

from kernel_hub import KernelFunction
from kernel_hub.formats import fmha_v2
from kernel_hub.formats.fmha_v2 import Params
from kernel_hub.memory import DeviceArray

CUBIN = Path(__file__).parent / "data/fmha_stand_in.cubin"
HEADS, TOTAL = 4, 48


def kernel(**fields: Any) -> KernelFunction:
    return fmha_v2.find(fmha_v2.load(CUBIN), **fields)


def array(*shape: int, dtype: str = "fp16") -> DeviceArray:
    return DeviceArray.zeros(shape, dtype)


def starts(*ends: int) -> DeviceArray:
    return DeviceArray.from_numpy(np.array([0, *ends], np.int32))


def arrived(fake: FakeCuda) -> Params:
    """The struct of the last launch, its parameter's bytes."""
    params = fake.launch().params
    assert params is not None
    (raw,) = params
    assert len(raw) == 704
    return Params.from_buffer_copy(raw)


def half2(value: float) -> int:
    return int.from_bytes(struct.pack("<e", value) * 2, "little")


def float_bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def paged(page_size: int = 32, dtype: str = "bf16") -> tuple[DeviceArray, ...]:
    """q, pool, block_table."""
    pool = array(12, 2, page_size, 128, dtype=dtype)
    return array(TOTAL, HEADS, 128, dtype=dtype), pool, array(2, 2, 3, dtype="int32")


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
    assert params.softcap == float_bits(30.0)
    assert params.scale_bmm1 == float_bits(128**-0.5 / 30.0)
