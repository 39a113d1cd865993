"""The ops of a mixture of experts beside the routers and layers of transformers, on the CPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the ops are torch ops")
pytest.importorskip("transformers", reason="transformers is not installed")

from kernel_hub.ops import (  # noqa: E402
    grouped_linear,
    moe_combine,
    moe_permute,
    moe_route,
    silu_and_mul,
)

SIZES = {"hidden_size": 64, "num_experts_per_tok": 4}


def modeling(name: str, *classes: str) -> Any:
    """The module of a model; skips where its classes have other names."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    if missing := [each for each in classes if not hasattr(module, each)]:
        pytest.skip(f"this transformers has no {missing} in {name}")
    return module


def check_routed(found: Any, router: Any, x: Any) -> None:
    """The same experts and weights, in whatever order."""
    given = router(x)
    if len(given) != 3:
        pytest.skip("a router of this transformers does not return (logits, weights, experts)")
    _, weights, experts = given
    order, own = experts.argsort(-1), found[1].argsort(-1)
    assert torch.equal(experts.gather(-1, order).int(), found[1].gather(-1, own))
    torch.testing.assert_close(found[0].gather(-1, own), weights.gather(-1, order).float())


@torch.no_grad()
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_softmax_routers(name: str) -> None:
    torch.manual_seed(0)
    if name == "mixtral":
        module = modeling(name, "MixtralTopKRouter")
        router = module.MixtralTopKRouter(module.MixtralConfig(num_local_experts=16, **SIZES))
    else:
        module = modeling(name, "Qwen3MoeTopKRouter")
        config = module.Qwen3MoeConfig(num_experts=16, norm_topk_prob=True, **SIZES)
        router = module.Qwen3MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight, std=0.2)
    x = torch.randn(50, 64)
    check_routed(moe_route(x @ router.weight.T, 4, renormalise=True), router, x)


@torch.no_grad()
def test_the_router_of_deepseek_v3() -> None:
    module = modeling("deepseek_v3", "DeepseekV3TopkRouter")
    torch.manual_seed(0)
    config = module.DeepseekV3Config(n_routed_experts=64, n_group=8, topk_group=3, **SIZES)
    router = module.DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight, std=0.2)
    router.e_score_correction_bias.uniform_(0.0, 0.2)
    x = torch.randn(50, 64)
    found = moe_route(
        x @ router.weight.T, 4, scoring="sigmoid", renormalise=True, num_groups=8, top_groups=3,
        bias=router.e_score_correction_bias, scale=config.routed_scaling_factor,
    )  # fmt: skip
    check_routed(found, router, x)


@torch.no_grad()
def test_the_layer_of_qwen3_moe() -> None:
    module = modeling("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeTopKRouter")
    torch.manual_seed(0)
    config = module.Qwen3MoeConfig(
        num_experts=8, norm_topk_prob=True, moe_intermediate_size=32,
        experts_implementation="eager", **SIZES,
    )  # fmt: skip
    layer = module.Qwen3MoeSparseMoeBlock(config)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    x = torch.randn(2, 25, 64)
    expected = layer(x).flatten(0, 1)

    gate_up, down = (w.bfloat16() for w in (layer.experts.gate_up_proj, layer.experts.down_proj))
    flat = x.flatten(0, 1).bfloat16()
    weights, experts = moe_route(x.flatten(0, 1) @ layer.gate.weight.T, 4, renormalise=True)
    rows, offsets, row_id_map = moe_permute(flat, experts, 8)
    inner = silu_and_mul(grouped_linear(rows, gate_up, offsets))
    out = moe_combine(grouped_linear(inner, down, offsets), row_id_map, weights)
    distance = (out.float() - expected).norm() / expected.norm()
    assert distance < 0.02, distance  # products of bf16
