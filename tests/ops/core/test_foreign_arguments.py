"""Whatever is passed for any argument of any op: a TensorError that names it, or a right answer.

The arguments come from the signatures, the calls by lot (call_cases).
"""

from __future__ import annotations

import inspect
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from call_cases import NAMES, Case, draw
from plan_only import OnGpu, on_gpu, plan_only

from kernel_hub import ops
from kernel_hub.errors import TensorError
from kernel_hub.ops import decode_attention, flash_attention, rms_norm
from kernel_hub.ops.core.launch import forget_all

SEEDS = range(2)
each_op = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(params=["cpu", "planned", pytest.param("gpu", marks=pytest.mark.gpu)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reference; what a CUDA tensor goes through, without a launch; a GPU."""
    if request.param == "planned":
        plan_only(monkeypatch)
    return str(request.param)


def device_of(way: str) -> str:
    return "cuda" if way == "gpu" else "cpu"


def cases(name: str, way: str = "cpu", seeds: Sequence[int] = SEEDS) -> Iterator[Case]:
    if "fp8" in name and way == "gpu" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("e4m3 needs a GPU of compute capability 9.0")
    for seed in seeds:
        case = draw(name, seed, device_of(way))
        yield on_gpu(case) if way == "planned" else case


class Wrapper(torch.Tensor):
    """Holds another tensor and no memory, as DTensor and quantised weights do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{op} on a Wrapper")

    def __repr__(self) -> str:
        return "Wrapper()"


class Named(torch.Tensor):
    """A subclass with memory, as users make them to carry something along."""


def _freed(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made.untyped_storage().resize_(0)
    return made


def _negated(x: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(x).as_subclass(type(x))


def _nested(x: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    parts = [torch.zeros(2, *x.shape[2:]), torch.zeros(3, *x.shape[2:])]
    return torch.nested.nested_tensor(parts, layout=layout).to(x.dtype)


# Of each kind, what no kernel can read; a part of what the message says.
ODD_TENSORS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "sparse": (lambda x: x.float().to_sparse(), "a strided tensor"),
    "csr": (lambda x: x.float().reshape(-1, 1).to_sparse_csr(), "a strided tensor"),
    "mkldnn": (lambda x: x.float().to_mkldnn(), "a strided tensor"),
    "nested": (lambda x: _nested(x, torch.strided), "a strided tensor"),
    "jagged": (lambda x: _nested(x, torch.jagged), "a strided tensor"),
    "quantised": (
        lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), "dequantize"
    ),
    "negated": (_negated, "resolve_neg"),
    "conjugate": (lambda x: x.to(torch.complex64).conj(), "resolve_conj"),
    "zeros without memory": (
        lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype), "a tensor with memory"
    ),
    "wrapper": (Wrapper, "memory of its own"),
    "uninitialised parameter": (
        lambda x: torch.nn.UninitializedParameter(requires_grad=False), "no shape yet"
    ),
    "uninitialised buffer": (lambda x: torch.nn.UninitializedBuffer(), "no shape yet"),
    "freed": (_freed, "freed or resized"),
}  # fmt: skip


@each_op
@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_tensors_without_plain_memory_are_named(name: str, kind: str, way: str) -> None:
    make, words = ODD_TENSORS[kind]
    made_one = False
    for case in cases(name, way):
        for key, tensor in case.tensors.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # prototypes of torch
                    odd = make(tensor)
            except (RuntimeError, NotImplementedError):  # torch has none of this dtype
                continue
            made_one = True
            if way == "planned" and kind in ("freed", "zeros without memory"):
                continue  # the launch sees it: the address is 0
            with pytest.raises(TensorError) as caught:
                case.call(**{key: odd})
            message = str(caught.value)
            assert message.startswith(case.op.removesuffix("_qkvpacked")), message
            assert f"{key}: expected" in message and words in message, (message, case)
    assert made_one or way == "gpu"


@each_op
def test_negated_views_after_a_plain_call(name: str, way: str) -> None:
    """A plan for these shapes is there: the bit is of the call's tensors."""
    for case in cases(name, way, range(30)):
        for _ in range(2):
            case.call()
            case.call_fresh()
        for key, tensor in case.tensors.items():
            with pytest.raises(TensorError, match=f"{key}: expected .*resolve_neg"):
                case.call(**{key: _negated(tensor)})
            if key not in case.outs:
                with pytest.raises(TensorError, match=f"{key}: expected .*resolve_neg"):
                    case.call_fresh(**{key: _negated(tensor)})


@each_op
def test_subclasses_with_memory_are_tensors(name: str) -> None:
    for case in cases(name):
        for key in case.inputs:
            if key not in case.caches:
                wanted = torch.utils._pytree.tree_leaves(case.call_fresh())
                changed = {key: case.tensors[key].as_subclass(Named)}
                found = torch.utils._pytree.tree_leaves(case.call_fresh(**changed))
                for one, other in zip(wanted, found, strict=True):
                    assert one is other is None or torch.equal(one, other.as_subclass(torch.Tensor))


class Strange:
    """What has a dtype and a shape, and nothing else of a tensor."""

    dtype, shape = torch.float16, (2, 3)


NOT_TENSORS: list[Any] = [
    None, True, 0, -1, 1.5, math.nan, 1j, "x", b"x", [1.0], (), {}, object(), int, torch,
    np.ones(3), np.ones((2, 3, 4, 5), np.float16), np.float32(1), np.array(1), range(3),
    torch.float16, torch.Size([2]), torch.device("cpu"), Strange(), memoryview(b"x"),
    torch.ones, torch.Generator(), torch.ones(3).untyped_storage(),
]  # fmt: skip
OTHER_TENSORS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.tensor(1.0),
    lambda: torch.tensor(1.0).half(),
    lambda: torch.tensor(3, dtype=torch.int32),
    lambda: torch.empty(0),
    lambda: torch.empty(0).half(),
    lambda: torch.ones(1).half(),
    lambda: torch.ones(2, 3),
    lambda: torch.ones(2, 3, 4, 5, 6).half(),
    lambda: torch.ones(1, 1, 1, 1).half(),
    lambda: torch.zeros(2, 0, 4, 16).half(),
    lambda: torch.ones(2, 3).bool(),
    lambda: torch.ones(2, 3, dtype=torch.complex64),
    lambda: torch.ones(2, 3).double(),
    lambda: torch.ones(2, 3, device="meta"),
    lambda: torch.ones(2, 16, device="meta").half(),
]


def parameters(op: str) -> list[str]:
    return list(inspect.signature(getattr(ops, op)).parameters)


def only_a_tensor_error(case: Case, **changes: Any) -> None:
    """Of what is wrong; what is not wrong is right."""
    key = next(iter(changes))
    try:
        case.call(**changes)
    except TensorError as refusal:
        assert str(refusal).startswith(case.op.removesuffix("_qkvpacked")), (key, str(refusal))


@each_op
def test_what_is_no_tensor_is_named(name: str, way: str) -> None:
    for case in cases(name, way):
        for key in case.tensors:
            for value in NOT_TENSORS:
                if value is None and key not in case.required:
                    only_a_tensor_error(case, **{key: value})
                    continue
                with pytest.raises(TensorError, match=rf"\b{key}: expected"):
                    case.call(**{key: value})


@each_op
def test_any_argument_may_be_anything(name: str, way: str) -> None:
    for case in cases(name, way):
        for key in parameters(case.op):
            for value in [*NOT_TENSORS, *(make() for make in OTHER_TENSORS)]:
                only_a_tensor_error(case, **{key: value})


@each_op
def test_no_other_tensor_is_written(name: str, way: str) -> None:
    """Nor one without elements for something that the op itself leaves out at times."""
    for case in cases(name, way, range(6)):
        for key in case.outs:
            for make in OTHER_TENSORS:
                other = make()
                if way == "gpu" and not other.is_meta:
                    other = other.cuda()
                other = other.as_subclass(OnGpu) if way == "planned" else other
                if other.shape != case.tensors[key].shape:
                    with pytest.raises(TensorError, match=key):
                        case.call(**{key: other})


@each_op
def test_two_arguments_may_be_anything(name: str, way: str) -> None:
    for seed in range(60):
        case, lot = draw(name, seed % 12, device_of(way)), random.Random(f"two {name} {seed}")
        values = [*NOT_TENSORS, *(make() for make in OTHER_TENSORS), *case.tensors.values()]
        first, second = lot.sample(parameters(case.op), 2)
        only_a_tensor_error(case, **{first: lot.choice(values), second: lot.choice(values)})


NUMBERS: list[Any] = [
    -1, -(2**31), 2**31, 2**63, 2**64, 10**400, -(10**400), -1.0, 1e-320, 1e308, math.inf,
    -math.inf, math.nan, Fraction(1, 3), np.float64(0.5), np.float16(1), np.int8(3), np.bool_(True),
    np.datetime64("2020-01-01"), np.str_("1"), True, 1 + 0j, "1", (1,), (1, 2, 3), (-2, 0),
    (0.5, 1), ("a", "b"), (None, None), [0, 0], (2**40, 2**40), (10**400, 0), torch.tensor(1),
    torch.tensor(0.5), torch.int8, torch.float64, "GELU", "",
]  # fmt: skip


@each_op
def test_numbers_switches_and_names(name: str, way: str) -> None:
    for case in cases(name, way):
        for key in parameters(case.op):
            if key in case.tensors:
                continue
            for value in NUMBERS:
                only_a_tensor_error(case, **{key: value})


# As whole numbers may come: of another width than a kernel's, and of its own.
WHOLE: list[Any] = [np.int8, np.int64, np.uint16, lambda value: np.array([value])[0]]


@each_op
def test_numbers_of_numpy_are_numbers(name: str, way: str) -> None:
    """In each argument that takes them as Python's; no plan is there yet."""
    for case in cases(name, way, range(1 if way == "cpu" else 2)):
        for key, parameter in inspect.signature(getattr(ops, case.op)).parameters.items():
            if key in case.tensors or isinstance(parameter.default, bool):
                continue
            for value in (0, 1, 2, 3, 8, 16, 64):
                try:
                    case.call(**{key: value})
                except TensorError:
                    continue
                for make in WHOLE[: 1 if way == "cpu" else None]:
                    forget_all()
                    case.call(**{key: make(value)})
                forget_all()
                if isinstance(case.options.get(key), float):
                    case.call(**{key: np.float32(value)})


@each_op
def test_windows_of_numpy_numbers(name: str, way: str) -> None:
    for case in cases(name, way):
        if "window_size" in parameters(case.op) and "fp8" not in name:
            for make in WHOLE:
                forget_all()
                case.call(window_size=(make(3), make(0)))


@each_op
def test_numbers_that_are_no_numbers_never_reach_a_result(name: str, way: str) -> None:
    """Nor those beyond fp32, which kernels take, or beyond it times log2(e)."""
    for case in cases(name, way):
        for key, default in case.options.items():
            if isinstance(default, float):
                for value in (math.nan, math.inf, -math.inf, 10**400, 1e308, -1e308, 3e38, "1", 1j):
                    with pytest.raises(TensorError, match=rf"{key}: expected"):
                        case.call(**{key: value})


def test_rms_norm_below_zero(way: str) -> None:
    device = device_of(way)
    x, weight = torch.randn(3, 8, device=device), torch.ones(8, device=device)
    if way == "planned":
        x, weight = x.as_subclass(OnGpu), weight.as_subclass(OnGpu)
    for eps in (-1, -1e-6, -math.inf, math.nan, math.inf):
        for options in ({}, {"out": torch.empty_like(x)}, {"residual": x.clone()}):
            with pytest.raises(TensorError, match="rms_norm: eps: expected"):
                rms_norm(x, weight, eps, **options)
    found = rms_norm(x, weight, 0.0)
    assert way == "planned" or found.isfinite().all()


def test_decode_attention_lengths_on_the_cpu() -> None:
    q, cache = torch.randn(2, 1, 4, 16).half(), torch.randn(2, 8, 2, 16).half()
    for length in (9, 100, 2**31 - 1):
        lengths = torch.tensor([3, length], dtype=torch.int32)
        with pytest.raises(TensorError, match=rf"cache_seqlens: expected .*, found {length}"):
            decode_attention(q, cache, cache, cache_seqlens=lengths)
    table = torch.tensor([[1, 0], [1, 2]], dtype=torch.int32)
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    with pytest.raises(TensorError, match=r"block_table: expected pages .* at \[1, 1\], found 2"):
        decode_attention(q, cache, cache, cache_seqlens=lengths, block_table=table)
    # What no length reaches may be anything.
    lengths[1] = 8
    decode_attention(q, cache, cache, cache_seqlens=lengths, block_table=table)


@pytest.mark.parametrize("bounds", [[-1, 5], [0, 6], [3, 1], [0, 2**31 - 1]])
def test_flash_attention_lengths_on_the_cpu(bounds: list[int]) -> None:
    q = torch.randn(5, 2, 16).half()
    bad, good = (torch.tensor(x, dtype=torch.int32) for x in (bounds, [0, 5]))
    for changes in ({"cu_seqlens_q": bad}, {"cu_seqlens_k": bad}):
        with pytest.raises(TensorError, match=next(iter(changes))):
            flash_attention(q, q, q, **{"cu_seqlens_q": good, "cu_seqlens_k": good, **changes})
