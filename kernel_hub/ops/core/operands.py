"""What every call is asked of its tensor arguments, whatever was planned for their shapes.

A gradient, a tangent, a transform of torch.func or a pending negation is in the tensor or the mode
of this call: no plan knows of it, and a kernel, which reads memory, would drop it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ...arrays.dtypes import NDARRAY
from ...errors import TensorError
from .refusals import refuse, say

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
# What Python and torch raise where an argument is not what the quick way takes it for: ops check
# everything then, and the check names it.
FOREIGN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

_is_tracing = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_STRIDED = torch.strided
_NO_DISPATCH = torch.Tensor.__torch_dispatch__
# Of what torch's tracers put in the place of tensors: the registered ops know what to do with them.
_TRACERS = "torch._subclasses."


class _NoLevel:
    _current_level = -1


# The transforms of torch.func that run, and the levels of forward-mode differentiation that are
# open. Neither is a public name: a torch without one loses only the refusal.
_functorch = getattr(torch._C, "_functorch", None)
transform = getattr(_functorch, "peek_interpreter_stack", lambda: None)
# What a transform that has ended left behind, for what it stood for.
unwrap_if_dead: Any = getattr(_functorch, "unwrap_if_dead", lambda x: x)
# Tensors of autograd's own vmap (is_grads_batched=True) stand for others too; no mode says so.
is_batched = getattr(_functorch, "is_legacy_batchedtensor", bool)
forward_ad: Any = torch.autograd.forward_ad
if not hasattr(forward_ad, "_current_level"):
    forward_ad = _NoLevel


class Operands:
    """The tensor arguments of an op, by name: those every call has, then those that may be None."""

    def __init__(
        self, op: str, required: str, optional: str = "", *, has_backward: bool = False
    ) -> None:
        self.op = op
        self.has_backward = has_backward  # of the required ones
        self.names = (*required.split(), *optional.split())

    def are_plain(self, required: Sequence[Any], optional: Sequence[Any] = ()) -> bool:
        """Whether a call runs here, on memory. False: it is for torch's dispatcher (tracing, fake
        and meta tensors, subclasses), if nothing is wrong with it.

        Raises TensorError for what the op would drop: gradients, tangents, transforms, negations.
        """
        if _is_tracing():
            self._check_gradients(required, optional)
            return False
        if transform() is not None or forward_ad._current_level >= 0:
            self.check_modes(*required, *optional)
        has_gradients = _is_grad_enabled()
        checks_gradients = has_gradients and not self.has_backward
        plain = True
        for x in required:
            if type(x) not in PLAIN_TYPES:
                plain = False
            elif x.is_neg() or (checks_gradients and x.requires_grad):
                self._refuse(required, optional)
        for x in optional:
            if x is None:
                continue
            if type(x) not in PLAIN_TYPES:
                plain = False
            elif x.is_neg() or (has_gradients and x.requires_grad):
                self._refuse(required, optional)
        if plain:
            return not required[0].is_meta
        self._check_gradients(required, optional)
        self.check_tensors(required, optional)
        return False

    def check_tensors(self, required: Sequence[Any], optional: Sequence[Any] = ()) -> None:
        """Name the first that is no tensor with elements in memory: what an op met and could not
        read may be any of them.
        """
        for place, (argument, x) in enumerate(zip(self.names, (*required, *optional), strict=True)):
            if x is not None or place < len(required):
                check_tensor(self.op, argument, x)

    def check_modes(self, *tensors: Any) -> None:
        """Refuse the transforms of torch.func, and tangents."""
        if transform() is not None:
            raise transform_refusal(self.op)
        self.check_tangents(*tensors)

    def check_tangents(self, *tensors: Any) -> None:
        """Refuse what forward-mode differentiation would follow."""
        if forward_ad._current_level < 0:
            return
        for argument, x in zip(self.names, tensors, strict=True):
            if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                raise TensorError(
                    f"{self.op}: {argument}: has a tangent (torch.autograd.forward_ad), but "
                    f"{self.op} has no forward-mode derivative; pass its primal, "
                    f"forward_ad.unpack_dual({argument}).primal"
                )

    def in_memory(self, dout: torch.Tensor) -> torch.Tensor:
        """What autograd brought for an output, with elements where kernels read them.

        Raises TensorError for what they would drop: tangents, transforms, what a subclass computes.
        """
        if (
            type(dout) in PLAIN_TYPES
            and dout.layout is _STRIDED
            and not (dout.is_neg() or dout._is_zerotensor() or is_batched(dout) or dout.is_meta)
            and not (_is_tracing() or forward_ad._current_level >= 0)
            and transform() is None
        ):
            return dout  # nothing of what follows has anything to do
        if dout.layout is not _STRIDED:
            dout = dout.to_dense()
        if getattr(dout, "_is_zerotensor", bool)():
            dout = torch.zeros(dout.shape, dtype=dout.dtype, device=dout.device)
        dout = dout.resolve_neg()
        if self.are_plain((dout,)) and is_batched(dout):
            self.check_tensors((dout,))
        return dout

    def _check_gradients(self, required: Sequence[Any], optional: Sequence[Any]) -> None:
        if not _is_grad_enabled():
            return
        first = len(required) if self.has_backward else 0
        for argument, x in zip(self.names[first:], (*required, *optional)[first:], strict=True):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                raise gradient_refusal(self.op, argument)

    def _refuse(self, required: Sequence[Any], optional: Sequence[Any]) -> None:
        self._check_gradients(required, optional)
        self.check_tensors(required, optional)


def is_quick(x: Any) -> bool:
    """Whether a call that has this tensor alone is one of a GPU's memory that a plan knows all of:
    eager, no gradient to follow, no mode. What is not is for `Operands.are_plain`."""
    return (
        not _is_tracing()
        and type(x) in PLAIN_TYPES
        and x.is_cuda
        and transform() is None
        and forward_ad._current_level < 0
        and not x.is_neg()
        and not (x.requires_grad and _is_grad_enabled())
    )


def bare_apply(function: Any) -> Any:
    """`function.apply` of an autograd.Function but for what torch does in Python before it: its
    transforms were refused, its dead wrappers unwrapped (`unwrap_if_dead`). 3 us of 9."""
    return super(torch.autograd.Function, function).apply


def bare_backward(function: Any) -> Any:
    """A decorator of an autograd.Function whose backward torch calls from C, without looking in
    Python for a vjp first. 2 us."""
    of_graph = getattr(function, "_backward_cls", None)  # no public name of torch's
    if of_graph is not None:
        of_graph.apply = function.backward
    return function


def gradient_refusal(op: str, argument: str) -> TensorError:
    """Where autograd would follow an argument, and nothing computes its gradient."""
    return TensorError(
        f"{op}: {argument}: requires grad, but {op} has no backward for it; call it under "
        f"torch.no_grad() or pass {argument}.detach()"
    )


def transform_refusal(op: str) -> TensorError:
    """Inside torch.func's transforms, whose tensors stand for others."""
    stack = getattr(_functorch, "get_interpreter_stack", lambda: None)()
    names = {str(each.key()).rpartition(".")[2].lower() for each in stack or ()}
    return TensorError(
        f"{op}: torch.func.vmap and the other transforms of torch.func are not supported "
        f"(here: {', '.join(sorted(names)) or 'unknown'}); "
        "leading dimensions are a batch without them"
    )


def check_tensor(op: str, argument: str, value: Any) -> None:
    """`value` must be a torch tensor whose elements lie in memory as its strides say."""
    if not isinstance(value, torch.Tensor):
        if isinstance(value, NDARRAY):
            found = f"a NumPy array of {value.dtype}, shape {value.shape}: torch.from_numpy(it)"
            raise refuse(op, argument, "a torch tensor", found)
        found = f"{type(value).__name__} {value!r:.60}"
        if isinstance(value, (list, tuple, int, float)) and argument != "out":
            found += ": torch.tensor(it, dtype=…, device=…) makes one"
        raise refuse(op, argument, "a torch tensor", found)
    if not _is_tracing() and (odd := _oddity(value)):
        raise refuse(op, argument, *odd)


def _oddity(x: torch.Tensor) -> tuple[str, str] | None:
    """(what was expected, what is found instead) of a tensor that no kernel can read."""
    kind = type(x)
    strided = "a strided tensor"
    if is_batched(x):
        return "a tensor with memory", "one of many gradients at once (is_grads_batched=True)"
    if is_lazy(x):
        return "a tensor with memory", f"{kind.__name__}, which has no shape yet"
    if x.is_nested or x.layout is not torch.strided:
        return strided, say(x)
    if kind.__torch_dispatch__ is not _NO_DISPATCH and not kind.__module__.startswith(_TRACERS):
        return (
            "a tensor with memory of its own (its local or inner one)",
            f"{kind.__name__}, whose __torch_dispatch__ says what its elements are: {say(x)}",
        )
    if x.is_quantized:
        return "a tensor of numbers (call .dequantize() or .int_repr() first)", say(x)
    if x.is_neg() or x.is_conj():
        resolve = "resolve_neg" if x.is_neg() else "resolve_conj"
        return (
            f"a tensor whose memory holds its values (call .{resolve}() first)",
            f"a view that is negated or conjugated when it is read: {say(x)}",
        )
    if getattr(x, "_is_zerotensor", bool)():
        return "a tensor with memory", f"zeros without any: {say(x)}"
    if kind in PLAIN_TYPES and not x.is_meta and x.numel() and _is_freed(x):
        return "a tensor with memory", f"one whose storage was freed or resized: {say(x)}"
    return None


def _is_freed(x: torch.Tensor) -> bool:
    """Whether a tensor's elements end behind its storage, as after untyped_storage().resize_()."""
    if getattr(torch, "_is_functional_tensor", bool)(x) or transform() is not None:
        return False
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.untyped_storage().nbytes() < (x.storage_offset() + span) * x.element_size()
