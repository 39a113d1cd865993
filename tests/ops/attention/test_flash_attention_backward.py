"""The gradients of attention against fp64 autograd: every variant, mask, layout and odd length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_devices import DEVICES, KIB
from bits import same_bits
from ways import Way

from kernel_hub.ops.attention.backward import portable as module
from kernel_hub.ops.attention.problem import Problem
from kernel_hub.ops.core.device import PlannedGpu
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded
from kernel_hub.testing.reference_attention import reference_backward_of, reference_of

FP16, BF16 = torch.float16, torch.bfloat16
# One of each kind of tiles: 227, 163 and 99 KiB of shared memory a block.
CAPABILITIES = [(9, 0), (8, 0), (8, 9)]
HEAD_DIMS = [32, 64, 96, 128, 160, 192, 256]


@pytest.fixture(autouse=True)
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's own kernels have their own tests."""
    monkeypatch.setattr(module.sm90, "is_enabled", False)


@pytest.fixture(params=CAPABILITIES, ids=str)
def capability(
    request: pytest.FixtureRequest, way: Way, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Each GPU's tiles where they are emulated; on a GPU its own."""
    if way.is_gpu:
        if request.param != CAPABILITIES[0]:
            pytest.skip("a GPU runs its own tiles")
        return torch.cuda.get_device_capability()
    device = PlannedGpu(request.param, 1, "", DEVICES[request.param] * KIB)
    monkeypatch.setattr(module, "device_of", lambda _: device)
    chosen: tuple[int, int] = request.param
    return chosen


@pytest.fixture
def any_capability(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    if not way.is_gpu:
        monkeypatch.setattr(module, "device_of", lambda _: PlannedGpu((9, 0), 1))


def make(
    way: Way,
    dtype: torch.dtype,
    lengths: tuple[int, int] | tuple[Sequence[int], Sequence[int]],
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 64,
    *,
    batch_size: int = 1,
    shift: int = 0,
    **options: Any,
) -> Problem:
    """Fixed lengths, or the lengths of each sequence; `shift` moves q off its alignment."""
    generator = torch.Generator().manual_seed(len(str(options)) + head_dim)
    ragged = {}
    rows = []
    for name, length in zip(("q", "k"), lengths, strict=True):
        if isinstance(length, int):
            rows.append((batch_size, length))
        else:
            bounds = torch.tensor([0, *length]).cumsum(0).to(torch.int32)
            ragged[f"cu_seqlens_{name}"] = bounds.to(way.device)
            rows.append((int(bounds[-1]),))
            batch_size = len(length)

    def random(side: int) -> torch.Tensor:
        values = torch.randn((*rows[side], heads[side], head_dim), generator=generator)
        guarded = Guarded(values.shape, dtype, way.device, shift=shift)
        return guarded.fill(values.to(dtype).to(way.device))

    q, k, v = random(0), random(1), random(1)
    most = [one if isinstance(one, int) else max(one) for one in lengths]
    options.setdefault("softmax_scale", head_dim**-0.5)
    return Problem(q, k, v, batch_size, most[0], most[1], **ragged, **options)


def run(
    problem: Problem,
    *,
    deterministic: bool = False,
    dout: torch.Tensor | None = None,
    shift: int = 0,
) -> list[torch.Tensor]:
    """The three gradients, held against the reference; poisoned before, guarded around."""
    dtype, device = problem.q.dtype, problem.q.device
    out, lse = reference_of(problem)
    out, lse = out.to(dtype), lse.float().contiguous()
    if dout is None:
        generator = torch.Generator().manual_seed(7)
        dout = torch.randn(problem.q.shape, generator=generator).to(dtype).to(device)
    tensors = (problem.q, problem.k, problem.v)
    grads = [Guarded(x.shape, dtype, device, shift=shift) for x in tensors]
    module.backward(
        problem, out, lse, dout, *(grad.tensor for grad in grads), deterministic=deterministic
    )
    truths = reference_backward_of(problem, dout)
    owns = reference_backward_of(problem, dout, dtype=dtype)
    for name, grad, truth, own in zip(("dq", "dk", "dv"), grads, truths, owns, strict=True):
        grad.check(name)
        check(grad.tensor, truth, own, name=name)
    return [grad.tensor for grad in grads]


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_variants(way: Way, capability: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    causal = {"window_right": 0}
    run(make(way, dtype, (70, 133), (2, 1), head_dim, **causal))
    run(make(way, dtype, (70, 133), (2, 1), head_dim, softcap=2.0, **causal))


@pytest.mark.parametrize("head_dim", [8, 16, 40, 72, 104, 136, 168, 200, 248])
def test_head_dims_between(way: Way, any_capability: None, head_dim: int) -> None:
    run(make(way, BF16, (33, 65), (1, 1), head_dim))


@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 199), (127, 128), (129, 127), (5, 0), (0, 5), (200, 31)], ids=str
)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (17, 4), (0, 0), (300, -1)], ids=str)
def test_lengths_and_windows(
    way: Way, any_capability: None, lengths: tuple[int, int], window: tuple[int, int]
) -> None:
    left, right = window
    run(make(way, FP16, lengths, window_left=left, window_right=right))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_ragged(way: Way, any_capability: None, head_dim: int) -> None:
    lengths = ([33, 0, 7, 70, 1, 20], [20, 30, 140, 0, 1, 150])
    for window_right in (-1, 0):
        run(make(way, BF16, lengths, (4, 2), head_dim, window_right=window_right))


@pytest.mark.parametrize("heads", [(3, 3), (8, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("num_sms", [1, 1000], ids=["a block a group", "a block a query head"])
def test_groups(
    way: Way,
    any_capability: None,
    monkeypatch: pytest.MonkeyPatch,
    heads: tuple[int, int],
    num_sms: int,
) -> None:
    problem = make(way, BF16, (40, 70), heads, 32, batch_size=2, window_right=0)
    found = module.device_of(problem.q.device)
    monkeypatch.setattr(module, "device_of", lambda _: found._replace(num_sms=num_sms))
    run(problem)
    run(make(way, BF16, ([40, 1], [0, 70]), heads, 32, window_right=0))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_alibi_and_softcap(way: Way, any_capability: None, head_dim: int) -> None:
    slopes = torch.tensor([[0.5, 0.02], [0.1, 1.0]], device=way.device)
    lengths = (40, 150)
    run(make(way, FP16, lengths, (2, 1), head_dim, batch_size=2, alibi_slopes=slopes))
    run(make(way, FP16, lengths, (2, 1), head_dim, batch_size=2, alibi_slopes=slopes[0],
             softcap=5.0, window_left=30, window_right=2))  # fmt: skip


@pytest.mark.parametrize("scale", [0.0, -0.3, 3.0])
def test_scales(way: Way, any_capability: None, scale: float) -> None:
    run(make(way, FP16, (40, 70), window_right=0, softmax_scale=scale))


@pytest.mark.parametrize("shift", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 88])
def test_unaligned(way: Way, any_capability: None, head_dim: int, shift: int) -> None:
    run(make(way, BF16, (40, 70), head_dim=head_dim, shift=shift), shift=shift)


def test_strides(way: Way, any_capability: None) -> None:
    # One packed (batch, seqlen, 3, heads, head_dim); dout with its heads outside, then expanded.
    packed = way.randn(2, 50, 3, 2, 64, dtype=BF16)
    q, k, v = packed.unbind(2)
    problem = Problem(q, k, v, 2, 50, 50, 0.125, window_right=0)
    run(problem, dout=way.randn(2, 2, 50, 64, dtype=BF16, seed=3).transpose(1, 2))
    run(problem, dout=torch.ones((), dtype=BF16, device=way.device).expand(q.shape))


def test_lengths_of_a_cache(way: Way, any_capability: None) -> None:
    lengths = torch.tensor([60, 0, 33], dtype=torch.int32, device=way.device)
    problem = make(way, BF16, (20, 90), batch_size=3, window_right=0, cache_seqlens=lengths)
    for x in (problem.k, problem.v):
        x[0, 60:] = x[1] = x[2, 33:] = float("nan")
    clean = problem._replace(k=problem.k.nan_to_num(0), v=problem.v.nan_to_num(0))
    expected = run(clean)
    dout = torch.randn(problem.q.shape, generator=torch.Generator().manual_seed(7))
    out, lse = reference_of(clean)
    grads = [torch.full_like(x, float("nan")) for x in (problem.q, problem.k, problem.v)]
    module.backward(
        problem, out.to(BF16), lse.float().contiguous(), dout.to(BF16).to(way.device), *grads,
        deterministic=True,
    )  # fmt: skip
    for grad, wanted in zip(grads[1:], expected[1:], strict=True):
        same_bits(grad, wanted)
    assert not grads[0].isnan().any()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic(way: Way, any_capability: None, head_dim: int) -> None:
    lengths = ([700, 300, 0, 1100], [900, 1, 40, 1100]) if way.is_gpu else ([20, 9], [130, 180])
    heads = (4, 2) if way.is_gpu else (1, 1)
    for options in ({}, {"window_right": 0}, {"window_left": 70, "window_right": 30}):
        problem = make(way, BF16, lengths, heads, head_dim, **options)
        first = run(problem, deterministic=True)
        for _ in range(3 if way.is_gpu else 0):
            for again, before in zip(run(problem, deterministic=True), first, strict=True):
                same_bits(again, before)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("lengths", [(1023, 1023), (500, 2000), (1500, 300)], ids=str)
def test_long(way: Way, any_capability: None, lengths: tuple[int, int], head_dim: int) -> None:
    for window_right in (-1, 0):
        run(make(way, BF16, lengths, (6, 2), head_dim, batch_size=2, window_right=window_right))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0)], ids=str)
def test_tiles_fit(capability: tuple[int, int]) -> None:
    limit = {(8, 0): 163, (8, 7): 163, (9, 0): 227}.get(capability, 99) << 10
    for head_dim in range(8, 257, 8):
        variant = module.choose(head_dim, DEVICES[capability] * KIB)
        assert module.stated(variant).shared_bytes <= limit, variant
        assert module.stated(variant).sizes["head_dim"] >= head_dim
