"""A backward is given what is right for its forward: gradients of any kind, unchanged tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import flash_attention, flash_attention_qkvpacked

forward_ad = torch.autograd.forward_ad
PACKED = [False, True]


class Named(torch.Tensor):
    """A subclass goes the registered ops' way."""


class Attended:
    """One attention, its output, and how to have its gradients."""

    def __init__(
        self, way: Way, packed: bool, *lead: int, kind: Any = torch.Tensor, **options: Any
    ) -> None:
        shape = (*(lead or (2, 5)), 3, 2, 32)
        options["deterministic"] = True
        self.qkv = way.randn(*shape, dtype=torch.float16).as_subclass(kind).requires_grad_()
        if packed:
            self.out = flash_attention_qkvpacked(self.qkv, **options)
        else:
            if "cu_seqlens" in options:
                options["cu_seqlens_q"] = options["cu_seqlens_k"] = options.pop("cu_seqlens")
            self.out = flash_attention(*self.qkv.unbind(-3), **options)

    def grad(self, dout: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.autograd.grad(self.out, self.qkv, dout, retain_graph=True, **options)[0]


@pytest.fixture(params=PACKED, ids=["apart", "packed"])
def attended(request: pytest.FixtureRequest, way: Way) -> Iterator[Attended]:
    yield Attended(way, request.param)


def _dout(attended: Attended) -> torch.Tensor:
    return (
        torch.linspace(-1, 1, attended.out.numel(), dtype=torch.float16)
        .view(attended.out.shape)
        .to(attended.out.device)
    )


# A gradient of another kind, and the same in memory.
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": torch._neg_view,
    "negated and strided": lambda x: torch._neg_view(x.transpose(1, 2).contiguous()).transpose(
        1, 2
    ),
    "broadcast": lambda x: x[:1, :1].expand(x.shape),
    "sparse": lambda x: x.to_sparse(),
    "zeros without memory": lambda x: torch._efficientzerotensor(
        x.shape, dtype=x.dtype, device=x.device
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_any_kind(kind: str, attended: Attended) -> None:
    dout = _dout(attended)
    odd = KINDS[kind](dout)
    wanted = torch.zeros_like(dout) if "zeros" in kind else odd.to_dense().resolve_neg().clone()
    assert torch.equal(attended.grad(odd), attended.grad(wanted))


@pytest.mark.parametrize("kind", [torch.Tensor, Named])
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_tangent_of_the_gradient_is_refused(
    kind: Any, packed: bool, create_graph: bool, way: Way
) -> None:
    with forward_ad.dual_level():
        attended = Attended(way, packed, kind=kind)
        dout = _dout(attended)
        dual = forward_ad.make_dual(dout, dout)
        with pytest.raises(TensorError, match="dout: has a tangent"):
            attended.grad(dual, create_graph=create_graph)


def test_many_gradients_at_once_are_refused(attended: Attended) -> None:
    dout = _dout(attended)
    with pytest.raises(TensorError, match=r"dout: .*is_grads_batched"):
        attended.grad(torch.stack([dout, dout]), is_grads_batched=True)
    with pytest.raises(TensorError, match=r"torch\.func\.vmap"):
        torch.func.vmap(attended.grad)(torch.stack([dout, dout]))


@pytest.mark.parametrize("kind", [torch.Tensor, Named])
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("table", ["cu_seqlens", "alibi_slopes", "cache_seqlens"])
def test_tables_that_were_overwritten(kind: Any, packed: bool, table: str, way: Way) -> None:
    """As a backward over an overwritten q would be."""
    if packed and table == "cache_seqlens":
        pytest.skip("packed tensors have none")
    lead = (9,) if table == "cu_seqlens" else (2, 5)
    values: dict[str, Any] = {
        "cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32),
        "alibi_slopes": torch.tensor([0.5, 0.25]),
        "cache_seqlens": torch.tensor([3, 5], dtype=torch.int32),
    }
    given = values[table].to(way.device)
    attended = Attended(way, packed, *lead, kind=kind, **{table: given})
    attended.grad(_dout(attended))
    given[1] = 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        attended.grad(_dout(attended))


def test_tables_made_in_inference_mode(way: Way) -> None:
    """Their writes are not counted by torch, and they serve all the same."""
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32, device=way.device)
    with torch.inference_mode():
        inference = bounds.clone()
    attended = [Attended(way, False, 9, cu_seqlens=table) for table in (bounds, inference)]
    dout = _dout(attended[0])
    assert torch.equal(attended[1].grad(dout), attended[0].grad(dout))
