"""Nothing that an op does is hidden from autograd, and what it would drop is refused by name.

Every op of `ops.__all__`, calls drawn by lot (call_cases).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from call_cases import NAMES, Case, draw
from plan_only import on_gpu, plan_only

from kernel_hub import ops
from kernel_hub.errors import TensorError
from kernel_hub.ops.core import operands, versions

forward_ad = torch.autograd.forward_ad
SEEDS = range(8)
each_op = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(params=["planned", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where torch's own writes do not hide what the ops forget to say: kernels, or no launch."""
    if request.param == "gpu":
        yield "cuda"
        return
    plan_only(monkeypatch)
    yield "planned"


@pytest.fixture(params=["cpu", "planned", pytest.param("gpu", marks=pytest.mark.gpu)])
def any_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reference too."""
    if request.param == "planned":
        plan_only(monkeypatch)
    return "cuda" if request.param == "gpu" else str(request.param)


def cases(name: str, device: str = "cpu") -> Iterator[Case]:
    if "fp8" in name and device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("e4m3 needs a GPU of compute capability 9.0")
    for seed in SEEDS:
        yield on_gpu(draw(name, seed)) if device == "planned" else draw(name, seed, device)


def versions_of(case: Case) -> dict[str, int]:
    return {name: tensor._version for name, tensor in case.tensors.items()}


def test_there_is_a_case_of_every_op() -> None:
    drawn = {draw(name, 0).op for name in NAMES}
    assert drawn == set(ops.__all__)


@each_op
def test_what_is_written_has_a_new_version(name: str, device: str) -> None:
    for case in cases(name, device):
        before = versions_of(case)
        case.call()
        changed = {key for key, was in before.items() if case.tensors[key]._version != was}
        assert changed == set(case.written), case
        before = versions_of(case)
        case.call_fresh()  # outputs of its own
        changed = {key for key, was in before.items() if case.tensors[key]._version != was}
        assert changed == set(case.caches), case


@each_op
def test_one_output_alone_has_a_new_version(name: str, device: str) -> None:
    for case in cases(name, device):
        for given in case.outs:
            before = versions_of(case)
            case.call(**{out: None for out in case.outs if out != given})
            changed = {key for key, was in before.items() if case.tensors[key]._version != was}
            assert changed == {given, *case.caches}, (case, given)


@each_op
def test_a_write_in_place_has_a_new_version(name: str, device: str) -> None:
    for case in cases(name, device):
        for out, x in case.in_place:
            if out in case.tensors and x in case.tensors:
                was = case.tensors[x]._version
                case.call(**{out: case.tensors[x]})
                assert case.tensors[x]._version > was, (case, out, x)


@each_op
def test_a_backward_over_what_was_overwritten_fails(name: str, device: str) -> None:
    for case in cases(name, device):
        for written in case.written:
            saved = case.tensors[written]
            if saved.dtype.itemsize == 1 or not saved.is_floating_point():
                continue  # autograd cannot save e4m3 as a factor, nor whole numbers
            weight = torch.ones_like(saved, requires_grad=True)
            product = (weight * saved).sum()
            case.call()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()


@each_op
def test_a_view_marks_what_it_is_a_view_of(name: str, device: str) -> None:
    for case in cases(name, device):
        for written in case.written:
            base = case.tensors[written]
            was = base._version
            case.call(**{written: base[:]})
            assert base._version > was


@each_op
def test_inference_tensors_are_written_without_a_word(name: str, device: str) -> None:
    with torch.inference_mode():
        made = list(cases(name, device))
        for case in made:
            case.call()
    for case in made:
        assert all(tensor.is_inference() for tensor in case.tensors.values())
        with torch.no_grad():
            case.call()
    for case in cases(name, device):  # one is, the other is not
        first = case.written[0]
        with torch.inference_mode():
            changes = {first: case.tensors[first].clone()}
        with torch.no_grad():
            case.call(**changes)


@each_op
def test_registered_ops_mark_what_they_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch.ops, on the CPU, whatever torch's own writes there do."""
    marked: list[int] = []
    are_plain = operands.Operands.are_plain

    def to_the_dispatcher(self: Any, *given: Any) -> bool:
        are_plain(self, *given)
        return False

    monkeypatch.setattr(operands.Operands, "are_plain", to_the_dispatcher)
    addresses = operator.methodcaller("data_ptr")  # of layouts, the ops make views
    monkeypatch.setattr(versions, "written", lambda found: marked.extend(map(addresses, found)))
    for case in cases(name):
        places = {key: tensor.data_ptr() for key, tensor in case.tensors.items()}
        marked.clear()
        case.call()
        assert {places[key] for key in case.written} <= set(marked), case
        marked.clear()
        case.call_fresh()
        assert {places[key] for key in case.caches} <= set(marked), case
        # Caches that are only read here are written as far as a schema can say.
        only_read = set(case.inputs) - {"k_cache", "v_cache"}
        assert not {places[key] for key in only_read} & set(marked), case


def test_every_registered_op_that_writes_is_one_that_a_case_reaches() -> None:
    """So that the test above leaves none out."""
    namespace = torch.ops.kernel_hub
    reached: set[str] = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if op.namespace == "kernel_hub":
                reached.add(op._schema.name.partition("::")[2])
            return op(*args, **(kwargs or {}))

    are_plain = operands.Operands.are_plain
    with pytest.MonkeyPatch.context() as patch, Watch():
        patch.setattr(
            operands.Operands, "are_plain", lambda *given: bool(are_plain(*given)) and False
        )
        for name in NAMES:
            for case in cases(name):
                case.call()
    # The library has been asked for each of its ops by `define`, so they are attributes by now.
    writing = {
        name
        for name in vars(namespace)
        if hasattr(getattr(namespace, name), "default")
        and any(
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in getattr(namespace, name).default._schema.arguments
        )
    }
    assert writing and writing <= reached


@pytest.mark.parametrize("takes", ["several", "one", "none"])
def test_whatever_torch_has_to_mark_with(monkeypatch: pytest.MonkeyPatch, takes: str) -> None:
    several = torch._C._increment_version

    def one(tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError("one tensor")
        if tensor.is_inference():
            raise RuntimeError("Inference tensors do not track version counter.")
        several((tensor,))

    if takes == "one":
        monkeypatch.setattr(torch._C, "_increment_version", one)
        monkeypatch.setattr(torch.autograd.graph, "increment_version", one)
    elif takes == "none":
        monkeypatch.delattr(torch._C, "_increment_version")
        monkeypatch.setattr(torch.autograd.graph, "increment_version", one)
    mark = versions._find()
    a, b = torch.ones(2), torch.ones(2)
    with torch.inference_mode():
        inference = torch.ones(2)
    mark((a, inference, b))
    assert a._version == b._version == 1


@each_op
def test_tangents_are_refused(name: str, any_way: str) -> None:
    for case in cases(name, any_way):
        with forward_ad.dual_level():
            case.call()  # a level alone is no obstacle
            for key, tensor in case.tensors.items():
                if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
                    continue
                dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
                dual = dual.as_subclass(type(tensor))
                with pytest.raises(TensorError, match=rf"\b{key}: has a tangent"):
                    case.call(**{key: dual})
                if key not in case.outs:
                    with pytest.raises(TensorError, match=rf"\b{key}: has a tangent"):
                        case.call_fresh(**{key: dual})


def _jvp(function: Callable[[Any], Any], x: Any) -> Any:
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))


def _vmap(function: Callable[[Any], Any], x: Any) -> Any:
    return torch.func.vmap(function)(torch.stack([x, x]))


def _functionalize(function: Callable[[Any], Any], x: Any) -> Any:
    return torch.func.functionalize(function)(x)


def _grad(function: Callable[[Any], Any], x: Any) -> Any:
    return torch.func.grad(lambda y: torch.utils._pytree.tree_leaves(function(y))[0].sum())(x)


@each_op
@pytest.mark.parametrize("transform", [_jvp, _vmap, _grad, _functionalize])
def test_transforms_of_torch_func_are_refused(name: str, transform: Any, any_way: str) -> None:
    for case in cases(name, any_way):
        for key in case.tensors:
            tensor = case.tensors[key]
            has_gradient = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
            if transform in (_jvp, _grad) and not has_gradient:
                continue
            with pytest.raises(TensorError, match=r"torch\.func"):
                transform(lambda x, key=key, case=case: case.call_fresh(**{key: x}), tensor)


@each_op
def test_many_gradients_at_once_are_refused(name: str, any_way: str) -> None:
    """In a backward that autograd's own vmap runs, as jacobian(vectorize=True) does."""
    for case in cases(name, any_way):
        for key, tensor in case.tensors.items():
            if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
                continue
            run = case.call if key in case.outs else case.call_fresh

            class Calls(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                    return x.clone()

                @staticmethod
                def backward(ctx: Any, grad: torch.Tensor, run: Any = run, key: Any = key) -> Any:
                    return run(**{key: grad})

            asking = tensor.detach().as_subclass(torch.Tensor).clone().requires_grad_()
            grads = torch.stack([asking, asking]).detach()
            with pytest.raises(TensorError, match=rf"\b{key}: .*is_grads_batched"):
                torch.autograd.grad(Calls.apply(asking), asking, grads, is_grads_batched=True)


@each_op
def test_a_transform_over_other_tensors_is_refused_too(name: str) -> None:
    """A kernel that runs inside one would be seen by none of it."""
    case = draw(name, 0)
    with pytest.raises(TensorError, match=r"torch\.func\.vmap"):
        torch.func.vmap(lambda x: (case.call(), x)[1])(torch.ones(2))


@each_op
def test_gradients_nobody_computes_are_refused(name: str, any_way: str) -> None:
    for case in cases(name, any_way):
        for key, tensor in case.tensors.items():
            if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
                continue
            asking = tensor.detach().clone().requires_grad_()
            if key not in case.differentiable:
                with pytest.raises(TensorError, match=rf"\b{key}: requires grad"):
                    case.call(**{key: asking})
            else:
                with pytest.raises(TensorError, match=r"\b(q|qkv): requires grad|into out|k: |v: "):
                    case.call(**{key: asking})
                found = torch.utils._pytree.tree_leaves(case.call_fresh(**{key: asking}))[0]
                assert found.requires_grad
            with torch.no_grad(), contextlib.suppress(RuntimeError):
                case.call(**{key: asking})
            with torch.no_grad():
                case.call_fresh(**{key: asking})
