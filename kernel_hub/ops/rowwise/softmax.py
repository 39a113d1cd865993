"""Softmax of rows, its logarithm, and their gradients (csrc/rowwise/softmax.cu)."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelHubError, TensorError
from ..core import common
from ..core.launch import GIVEN, Launch, Plans, call_first
from . import softmax_plan as planning

_OP, _LOG, _BACKWARD = "softmax", "log_softmax", planning.BACKWARD
_OPERANDS = {op: common.Operands(op, "x", "mask out", has_backward=True) for op in (_OP, _LOG)}
_GRADIENT = common.Operands(_OP, "dout", has_backward=True)
_writes = common.Writes(_OP, "out x mask", "out", in_place="out=x")
_writes_gradient = common.Writes(_BACKWARD, "dx dout out", "dx")
_plans: Plans[tuple[Launch, common.Spans]] = Plans()
_plain_plans: Plans[Any] = Plans()
_empty_like, _is_quick = torch.empty_like, common.is_quick
_MOST = common.MAX_NUMBER


def softmax(
    x: torch.Tensor, *, mask: torch.Tensor | None = None, scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The softmax of each row, of scaled and masked values.

        s = x * scale, + mask where that is numbers, or -inf where it is False
        out = exp(s - max(s)) / sum(exp(s - max(s)))

    computed in fp32 and rounded once.

    x: (..., size), fp16, bf16 or fp32, on the GPU or the CPU; last dimension contiguous, the
        leading ones in at most three separately strided groups.
    mask: (..., size), broadcast along leading dimensions; bool (True takes part) or the dtype of x
        (added), last dimension contiguous. A row of which nothing takes part is nan, as torch's.
    scale: of x, before the mask.
    out: like x, strides of its own; may be x itself (in place), no other overlap.

    Returns out, differentiable by x where `out` is not given; the gradient is made of the output:
    dx = scale * out * (dout - sum(dout * out)). A CUDA tensor runs the shipped cubin on torch's
    current stream; a CPU tensor runs a reference in torch. Raises TensorError naming the argument
    that does not fit.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    return _call(_OP, x, mask, scale, False, out)


def log_softmax(
    x: torch.Tensor, *, mask: torch.Tensor | None = None, scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The logarithm of the softmax of each row, of scaled and masked values.

        s = x * scale, + mask where that is numbers, or -inf where it is False
        out = s - max(s) - log(sum(exp(s - max(s))))

    Arguments, result and errors as `softmax`; dx = scale * (dout - exp(out) * sum(dout)), 0
    where out is -inf.
    """
    return _call(_LOG, x, mask, scale, True, out)


def _call(op: str, x: Any, mask: Any, scale: Any, is_log: bool, out: Any) -> torch.Tensor:
    try:
        if (
            mask is out is None
            and type(scale) is float
            and -_MOST <= scale <= _MOST
            and _is_quick(x)
        ):
            # The quick way through eager calls: no function between this and the launch.
            key = (
                x.dtype, x.shape, x.is_contiguous() or x.stride(), x.data_ptr() & 15,
                x.get_device(),
            )  # fmt: skip
            plan = _plain_plans.get(key)
            found: torch.Tensor
            if plan is None:
                found = _first_plain(op, x, key, +is_log, scale)
            else:
                found = plan(x, +is_log, scale)
            return found
    except common.FOREIGN:
        _OPERANDS[op].check_tensors((x,), (mask, out))
        planning.check(op, x, mask, out)
        raise
    operands = _OPERANDS[op]
    scale = common.check_number(op, "scale", scale)
    is_plain = operands.are_plain((x,), (mask, out))
    has_gradient = torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad
    if has_gradient and out is not None:
        raise common.gradient_refusal(f"{op} into out", "x")
    try:
        if not is_plain:
            return _registered.run((x, mask, scale, is_log), out)
        if has_gradient:
            found = _Softmax.apply(x, mask, scale, is_log)
            return found
        made = _empty_like(x) if out is None else out
        (_cuda_into if x.is_cuda else _cpu_into)(x, mask, scale, is_log, made, out is not None)
    except common.FOREIGN:
        operands.check_tensors((x,), (mask, out))
        planning.check(op, x, mask, out)
        raise
    if out is not None:
        common.written((out,))
    return made


def _found(op: str, kind: str, tensors: tuple[Any, ...], check: Any, a_thread: int) -> Any:
    """(launch, spans) of a call, planned before or now."""
    low_bits = 0
    for t in tensors:
        if t is not None:
            low_bits |= t.data_ptr() & (3 if t.dtype == torch.bool else 15)
    layout = [None if t is None else (t.dtype, t.shape, t.stride(), t.device) for t in tensors]
    key = (op, low_bits, *layout)
    found = _plans.get(key)
    if found is None:
        check()
        spread = [t if t is None else t.expand(tensors[0].shape) for t in tensors]
        launch = planning.plan(op, kind, spread, low_bits, a_thread)
        writes = _writes if op == _OP else _writes_gradient
        found = _plans.keep(key, (launch, writes.spans(*tensors)))
    return found


def _run(launch: Launch, tensors: tuple[Any, ...], rest: tuple[Any, ...], check: Any) -> None:
    function, grid, block, shared_bytes, numbers, _, options = launch
    try:
        function(grid, block, shared_bytes, None, (*tensors, *numbers, *rest), **options)
    except KernelHubError:
        check()  # the launch checks devices and dtypes; this names them
        raise


def _first_plain(op: str, x: torch.Tensor, key: tuple[Any, ...], *rest: Any) -> torch.Tensor:
    """Of rows of a CUDA tensor without a mask into a new one."""
    planning.check(op, x, None, None)
    new, kind, given = _empty_like(x), common.DTYPE_TOKENS[x.dtype], GIVEN
    launch, _ = _found(_OP, kind, (new, x, None), lambda: None, 4)
    params = (given, None, *launch.numbers, 0, given, given)
    return call_first(_plain_plans, key, launch, new, params, x, *rest)


def _cuda_into(
    x: Any, mask: Any, scale: float, is_log: bool, out: Any, is_given: bool = True
) -> None:
    """The softmax of a CUDA tensor. is_given: the caller gave what is written."""

    def check() -> None:
        planning.check(_LOG if is_log else _OP, x, mask, out)

    tensors, kind = (out, x, mask), common.DTYPE_TOKENS.get(x.dtype, "")
    launch, spans = _found(_OP, kind, tensors, check, 4)
    if is_given:
        addresses = tuple([t.data_ptr() for t in tensors if t is not None])
        if addresses not in spans.apart:
            spans.check(addresses)
    is_added = mask is not None and mask.dtype != torch.bool
    _run(launch, tensors, (int(is_added), int(is_log), scale), check)


def _cpu_into(
    x: Any, mask: Any, scale: float, is_log: bool, out: Any, is_given: bool = True
) -> None:
    """The same on the CPU, by torch."""
    planning.check(_LOG if is_log else _OP, x, mask, out)
    if is_given:
        _writes.check(out, x, mask)
    s = x.float() * scale
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask.float()
    out.copy_(torch.log_softmax(s, -1) if is_log else torch.softmax(s, -1))


def _cuda_gradient_into(dout: Any, out: Any, scale: float, is_log: bool, dx: Any) -> None:
    """The gradient of a CUDA tensor."""

    def check() -> None:
        planning.check_gradient(_BACKWARD, dout, out, dx)

    tensors, token = (dx, dout, out), common.DTYPE_TOKENS.get(out.dtype, "")
    a_thread = 4 if token == "fp32" else 2
    launch, _ = _found(_BACKWARD, f"backward_{token}", tensors, check, a_thread)
    _run(launch, tensors, (int(is_log), scale), check)


def _cpu_gradient_into(dout: Any, out: Any, scale: float, is_log: bool, dx: Any) -> None:
    """The same on the CPU, by torch."""
    planning.check_gradient(_BACKWARD, dout, out, dx)
    grad, found = dout.float(), out.float()
    if is_log:
        dx.copy_(scale * (grad - found.exp() * grad.sum(-1, keepdim=True)))
        dx.masked_fill_(found == -torch.inf, 0)
    else:
        dx.copy_(scale * found * (grad - (grad * found).sum(-1, keepdim=True)))


def _gradient(dout: Any, out: Any, scale: float, is_log: bool) -> torch.Tensor:
    if dout.shape and dout.shape[-1] > 1 and dout.stride(-1) != 1:
        dout = dout.contiguous()
    dx = _empty_like(out)
    (_cuda_gradient_into if out.is_cuda else _cpu_gradient_into)(dout, out, scale, is_log, dx)
    return dx


def _gradient_fake(dout: Any, out: Any, scale: float, is_log: bool) -> torch.Tensor:
    if dout.shape != out.shape or dout.dtype != out.dtype:
        raise common.refuse(_BACKWARD, "dout", "shape and dtype of out", dout)
    return _empty_like(out)


# By their names at each call: a test gives one another's.
_registered = common.define_pair(
    _OP, "Tensor x, Tensor? mask, float scale, bool is_log",
    new=lambda x, *_: _empty_like(x),
    cuda=lambda *given: _cuda_into(*given), cpu=lambda *given: _cpu_into(*given),
    check=lambda x, mask, scale, is_log, out: planning.check(
        _LOG if is_log else _OP, x, mask, out
    ),
)  # fmt: skip
_backward = common.define(
    f"{_BACKWARD}(Tensor dout, Tensor out, float scale, bool is_log) -> Tensor",
    cuda=_gradient, cpu=_gradient, fake=_gradient_fake,
)  # fmt: skip


class _Softmax(torch.autograd.Function):  # type: ignore[misc]
    """Eager calls, without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, x: Any, mask: Any, scale: float, is_log: bool) -> torch.Tensor:
        out = _empty_like(x)
        (_cuda_into if x.is_cuda else _cpu_into)(x, mask, scale, is_log, out, False)
        ctx.save_for_backward(out)
        ctx.set_materialize_grads(False)
        ctx.rest = (scale, is_log)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> tuple[Any, ...]:
        if dout is None:
            return (None,) * 4
        dout = _GRADIENT.in_memory(dout)
        # Where the gradient's own gradient is wanted, the registered op refuses.
        run = _backward if torch.is_grad_enabled() else _gradient
        return run(dout, *ctx.saved_tensors, *ctx.rest), None, None, None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, mask, *ctx.rest = inputs
    if mask is not None and mask.requires_grad:
        raise common.gradient_refusal(_OP, "mask")
    ctx.save_for_backward(output)


def _grad(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    _GRADIENT.check_tangents(dout)
    return _backward(dout, *ctx.saved_tensors, *ctx.rest), None, None, None


def _no_double(ctx: Any, *grads: Any) -> None:
    raise TensorError(f"{_OP}: the gradients of its gradients (double backward) are not there")


torch.library.register_autograd(
    _registered.returning.name(), _grad, setup_context=_setup, lib=common.LIBRARY
)
torch.library.register_autograd(_backward.name(), _no_double, lib=common.LIBRARY)
