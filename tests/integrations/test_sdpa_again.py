"""Calls of torch's attention that the door has seen before: launched at once, as the first time.

CPU tensors are planned for, and launches are kept instead of made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_hub.integrations import sdpa  # noqa: E402
from kernel_hub.ops.attention import eager, forward_sm90, forward_split_sm90  # noqa: E402
from kernel_hub.ops.core import bounds, common, device, tensor_maps  # noqa: E402

attend = torch.ops.aten._scaled_dot_product_flash_attention
GPUS = [
    device.PlannedGpu((8, 0), 108, "", 163 << 10, 164 << 10),
    device.PlannedGpu((9, 0), 132, "NVIDIA H200", 227 << 10, 228 << 10),
]
# batch size, heads of queries and of keys, tokens of each, head_dim
SHAPES = [(2, 4, 4, 50, 50, 64), (1, 8, 2, 257, 77, 80), (1, 2, 2, 16, 4096, 128)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What launches were given, tensors as (address, elements)."""
    found: list[Any] = []

    def seen(x: Any) -> Any:
        return (x.data_ptr(), x.numel()) if torch.is_tensor(x) else x

    def shipped(cubin: str, function: str) -> Any:
        def launch(*given: Any, **options: Any) -> None:
            found.append((function, given[:4], [*map(seen, given[4])], options))

        return launch

    monkeypatch.setattr(common, "shipped", shipped)
    monkeypatch.setattr(eager, "cpu_forward", eager.cuda_forward)
    monkeypatch.setattr(bounds, "flag", lambda *_: None)
    monkeypatch.setattr(forward_sm90, "applies", forward_sm90.fits)
    for module in (forward_sm90, forward_split_sm90):
        if hasattr(module, "counters"):
            monkeypatch.setattr(module, "counters", lambda _, count: b"counters")
    known: dict[Any, bytes] = {}
    monkeypatch.setattr(
        tensor_maps, "make", lambda key, *_: known.setdefault(key, repr(key).encode())
    )
    monkeypatch.setattr(tensor_maps, "known", known)
    sdpa._taken.clear()
    handle = sdpa._register("CPU")
    yield found
    handle.remove()


@pytest.mark.parametrize("gpu", GPUS, ids=["sm80", "sm90"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_launches(launches: list[Any], gpu: Any, shape: Any) -> None:
    batch_size, heads, kv_heads, seqlen_q, seqlen_k, head_dim = shape
    rows = [(seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads)]
    qkv = [
        torch.randn(batch_size, *each, head_dim).bfloat16().transpose(1, 2) for each in rows
    ]  # fmt: skip
    with device.pretend(gpu):
        outputs = []
        for _ in range(3):
            outputs.append(attend(*qkv, scale=0.3))
            if len(outputs) == 1:
                count = len(launches)
        assert sdpa._taken == {sdpa._SDPA: 3} and count and len(launches) == 3 * count
        inputs = {x.data_ptr() for x in qkv}
        for i, again in enumerate(launches[count:]):
            first, out = launches[i % count], outputs[1 + i // count][0]
            assert again[0] == first[0] and again[1][:3] == first[1][:3] and again[3] == first[3]
            assert again[2][0][0] == out.data_ptr()
            for mine, other in zip(again[2], first[2], strict=True):
                is_own = type(mine) is tuple and mine[0] not in inputs  # results, and room
                assert mine[1] == other[1] if is_own else mine == other
        for found, was in zip(outputs[1], outputs[0], strict=True):
            if torch.is_tensor(found):
                assert found.shape == was.shape and found.stride() == was.stride()
                assert found.dtype == was.dtype
        assert outputs[1][0].data_ptr() != outputs[0][0].data_ptr()


def test_what_differs_is_another_call(launches: list[Any]) -> None:
    """Strides, a causal mask, a scale, other addresses: as if it were the first of its kind."""
    with device.pretend(GPUS[1]):
        qkv = [torch.randn(8, 32, 300, 64).bfloat16() for _ in range(3)]  # in one launch
        for _ in range(2):
            attend(*qkv)
        before = launches[-1]
        attend(*qkv, 0.0, True)
        assert launches[-1][0] != before[0]
        attend(*qkv, scale=0.5)
        assert launches[-1][2][3:] != before[2][3:]
        other = [x.clone() for x in qkv]
        attend(*other)
        maps, former = (
            {x for x in each[2] if isinstance(x, bytes) and x != b"counters"}
            for each in (launches[-1], before)
        )
        assert len(maps) == 3 and not maps & former
        turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
        assert attend(*turned)[0].stride() == turned[0].stride()
        assert sdpa._taken[sdpa._SDPA] == 6


def test_debugging_looks_at_every_call(
    launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with device.pretend(GPUS[1]):
        qkv = [torch.randn(8, 32, 300, 64).bfloat16() for _ in range(3)]  # in one launch
        attend(*qkv)
        asked: list[int] = []
        monkeypatch.setattr(eager, "cpu_forward", lambda *_: asked.append(1) or (qkv[0],) * 3)
        attend(*qkv)
        assert not asked
        monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
        attend(*qkv)
        assert asked
