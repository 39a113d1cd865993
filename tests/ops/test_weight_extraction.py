"""The int4 and int8 weight kernels that clients of cpm_kernels name, bit by bit against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same_bits
from ways import Way, emulated_function

from kernel_hub.testing.guard import Guarded

CUBIN = "weight_extraction"
KINDS = {
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Bfloat16": torch.bfloat16,
}
# Vectors, their last one cut, one element; the rows of ChatGLM-6B's layers.
SIZES = [1, 2, 3, 4, 7, 8, 12, 31, 33, 64, 100, 1024, 1030, 2048, 6848]


def launch(way: Way, name: str, n: int, m: int, params: list[Any], **geometry: Any) -> None:
    """As the clients do: one block a row."""
    threads = min(-(-m // 32) * 32, 1024)
    grid, block = geometry.get("grid", (n, 1, 1)), geometry.get("block", (threads, 1, 1))
    function: Callable[..., None]
    if way.is_gpu:
        from kernel_hub import Kernel

        function = Kernel(CUBIN)[name]
    else:
        function = emulated_function(CUBIN, name)
    function(grid, block, 0, None, [*params, n, m])


def some_bytes(way: Way, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[-1])
    values = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    return values.to(way.device)


def unpacked(weight: torch.Tensor) -> torch.Tensor:
    """(n, m) -> (n, 2 m): the high half of each byte, then the low one, both signed."""
    return torch.stack((weight >> 4, (weight << 4) >> 4), -1).reshape(len(weight), -1)


def check_extraction(
    way: Way, bits: int, kind: str, n: int, m: int, shift: int = 0, **geometry: Any
) -> None:
    dtype = KINDS[kind]
    weight = Guarded((n, m), torch.int8, way.device, shift=shift)
    weight.fill(some_bytes(way, n, m))
    scale = way.randn(n, dtype=dtype)
    values = unpacked(weight.tensor) if bits == 4 else weight.tensor
    out = Guarded(values.shape, dtype, way.device, shift=shift)
    name = f"int{bits}WeightExtraction{kind}"
    launch(way, name, n, m, [weight.tensor, scale, out.tensor], **geometry)
    out.check()
    weight.check("weight")
    same_bits(out.tensor, values.to(dtype) * scale[:, None])


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_extraction(way: Way, bits: int, kind: str, m: int) -> None:
    for n in [1, 3, 300, 4096] if way.is_gpu else [3]:
        check_extraction(way, bits, kind, n, m)


@pytest.mark.parametrize("m", [4, 8, 12, 48])
def test_blocks_that_take_several_rows(way: Way, m: int) -> None:
    for n in (1024, 2101, 5000):
        check_extraction(way, 4, "Half", n, m)
        check_compression(way, n, m)


@pytest.mark.parametrize("shift", [1, 2, 4])
@pytest.mark.parametrize("kind", ["Float", "Half", "BFloat16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_extraction_of_shifted_tensors(way: Way, bits: int, kind: str, shift: int) -> None:
    check_extraction(way, bits, kind, 3, 128, shift=shift)


@pytest.mark.parametrize("grid, block", [((1, 1, 1), (32, 1, 1)), ((7, 1, 1), (96, 1, 1))])
@pytest.mark.parametrize("m", [64, 67])
def test_any_geometry(way: Way, m: int, grid: Any, block: Any) -> None:
    check_extraction(way, 4, "Half", 5, m, grid=grid, block=block)
    check_compression(way, 5, m, grid=grid, block=block)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_byte_with_scales_to_the_limits(way: Way, bits: int) -> None:
    weight = torch.arange(-128, 128, dtype=torch.int8).repeat(8, 1).to(way.device)
    scale = torch.tensor([0.0, -0.0, 1e-7, -6e-8, 600.0, 65504.0, torch.inf, torch.nan])
    values = unpacked(weight) if bits == 4 else weight
    for kind, dtype in KINDS.items():
        out = Guarded(values.shape, dtype, way.device)
        factors = scale.to(dtype).to(way.device)
        launch(way, f"int{bits}WeightExtraction{kind}", 8, 256, [weight, factors, out.tensor])
        expected = values.to(dtype) * factors[:, None]
        assert torch.equal(out.tensor.isnan(), expected.isnan())
        same_bits(out.tensor.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))


def check_compression(way: Way, n: int, m: int, shift: int = 0, **geometry: Any) -> None:
    weight = Guarded((n, 2 * m), torch.int8, way.device, shift=shift)
    weight.fill(some_bytes(way, n, 2 * m))
    out = Guarded((n, m), torch.int8, way.device, shift=shift)
    launch(way, "int4WeightCompression", n, m, [weight.tensor, out.tensor], **geometry)
    out.check()
    weight.check("weight")
    high, low = weight.tensor[:, ::2], weight.tensor[:, 1::2]
    assert torch.equal(out.tensor, (high << 4) | (low & 15))


@pytest.mark.parametrize("m", SIZES)
def test_compression(way: Way, m: int) -> None:
    for n in [1, 3, 300, 4096] if way.is_gpu else [3]:
        check_compression(way, n, m)


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_compression_of_shifted_tensors(way: Way, shift: int) -> None:
    check_compression(way, 3, 128, shift=shift)


def test_compressed_weights_come_back(way: Way) -> None:
    weight = (some_bytes(way, 5, 96) >> 4).contiguous()
    packed = torch.empty(5, 48, dtype=torch.int8, device=way.device)
    launch(way, "int4WeightCompression", 5, 48, [weight, packed])
    out = torch.empty(5, 96, dtype=torch.float16, device=way.device)
    ones = torch.ones(5, dtype=torch.float16, device=way.device)
    launch(way, "int4WeightExtractionHalf", 5, 48, [packed, ones, out])
    assert torch.equal(out, weight.half())
