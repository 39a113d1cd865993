"""Hugging Face's kernels package with our layers, by its own kernelize, on transformers' models."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
kernels = pytest.importorskip("kernels")

import tiny_models as tiny  # noqa: E402

from kernel_hub.integrations import kernels as door  # noqa: E402
from kernel_hub.testing.compare import check  # noqa: E402

INFERENCE = kernels.Mode.INFERENCE
COMPILED = kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE


def kernelized(model: Any, mode: Any = INFERENCE) -> Any:
    with kernels.use_kernel_mapping(door.mapping("cpu"), inherit_mapping=False):
        return kernels.kernelize(model, mode=mode, device="cpu")


def replaced(model: Any) -> set[str]:
    """Classes of modules whose forward is one of `layers`."""
    return {
        type(module).__name__
        for module in model.modules()
        if "kernel_hub" in getattr(vars(module).get("forward"), "__module__", "")
    }


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model(family: str, dtype: Any) -> None:
    models = tiny.Models(family, dtype, attention="eager")
    models.ours = kernelized(models.ours)
    norms = {name for name in replaced(models.ours) if name.endswith("RMSNorm")}
    assert norms
    models.check(tiny.tokens_of(2, 17))


def test_a_compiled_model() -> None:
    models = tiny.Models("llama", torch.bfloat16, attention="eager")
    ours = kernelized(models.ours, COMPILED)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    tokens = tiny.tokens_of(1, 9)
    found = [tiny.logits_of(compiled, input_ids=tokens)]
    found += [tiny.logits_of(model, input_ids=tokens) for model in (models.truth, models.own)]
    check(*found)


def test_training_keeps_the_originals() -> None:
    model = tiny.model_of("llama", torch.bfloat16).train()
    assert not replaced(kernelized(model, kernels.Mode.TRAINING))


def layer(name: str) -> type:
    """A layer of that name, which a model might have."""
    functional = torch.nn.functional

    class Gated(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            gate, up = x.chunk(2, -1)
            return functional.silu(gate) * up

    class Product(torch.nn.Linear):
        pass

    class Mlp(torch.nn.Module):
        def __init__(self, bias: bool = False) -> None:
            super().__init__()
            self.gate_proj = torch.nn.Linear(32, 48, bias)
            self.up_proj = torch.nn.Linear(32, 48, bias)
            self.down_proj = torch.nn.Linear(48, 32, bias)

        def forward(self, x: Any) -> Any:
            return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))

    cls: type = {"SiluAndMul": Gated, "Linear": Product, "SwiGLUMLP": Mlp}[name]
    return kernels.use_kernel_forward_from_hub(name)(cls)


@pytest.mark.parametrize(
    "name, arguments",
    [("SiluAndMul", ()), ("Linear", (32, 24)), ("Linear", (32, 24, False)), ("SwiGLUMLP", ()),
     ("SwiGLUMLP", (True,))],
)  # fmt: skip
@pytest.mark.parametrize("is_compiled", [False, True])
@torch.no_grad()
def test_a_layer(name: str, arguments: tuple[Any, ...], is_compiled: bool) -> None:
    torch.manual_seed(0)
    own = layer(name)(*arguments).bfloat16().eval()
    x = torch.randn(2, 5, 32).bfloat16()
    truth, in_bf16 = layer(name)(*arguments).double().eval(), own(x)
    truth.load_state_dict(own.state_dict())
    ours = kernelized(own, COMPILED)
    assert "kernel_hub" in vars(ours)["forward"].__module__
    if is_compiled:
        torch._dynamo.reset()
        ours = torch.compile(ours, backend="aot_eager", fullgraph=True)
    check(ours(x), truth(x.double()), in_bf16)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@torch.no_grad()
def test_rotation(family: str, unsqueeze_dim: int, rows: int) -> None:
    """gpt-oss' tables have one half of what the others' have."""
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    from kernel_hub.integrations.kernels.layers import RotaryPosEmb

    torch.manual_seed(0)
    shapes = ((3, 4, 7, 32), (3, 2, 7, 32))
    q, k = (torch.randn(shape).bfloat16() for shape in shapes)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    angles = torch.randn(rows, 7, 16).repeat(1, 1, 1 if family == "gpt_oss" else 2)
    tables = angles.cos().bfloat16(), angles.sin().bfloat16()
    found = RotaryPosEmb()(q, k, *tables, unsqueeze_dim=unsqueeze_dim)
    rotate = modeling.apply_rotary_pos_emb
    own = rotate(q, k, *tables, unsqueeze_dim=unsqueeze_dim)
    wide = [x.double() for x in (q, k, *tables)]
    truth = rotate(*wide, unsqueeze_dim=unsqueeze_dim)
    for each in zip(found, truth, own, strict=True):
        check(*each)
