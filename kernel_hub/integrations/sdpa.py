"""`activate()`: torch's `scaled_dot_product_attention` on a GPU runs kernel_hub's attention.

Stands where torch's own flash kernels are registered; what it lacks goes to the kernel that was
there before, and `report()` says how often and why.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import CubinNotFoundError, KernelHubError, TensorError
from ..ops.attention import checks
from ..ops.attention import eager as run
from ..ops.attention.problem import Options
from ..ops.core import common
from ..ops.core.launch import Plans

__all__ = ["NAME", "SdpaReport", "activate", "report", "restore"]

NAME = "kernel_hub"  # of the implementation in torch's own registry
_OP, _SDPA = "flash_attention", "_scaled_dot_product_flash_attention"
_FLASH = 1  # torch.nn.attention.SDPBackend.FLASH_ATTENTION
_NEEDED = (
    "register_flash_attention_impl", "activate_flash_attention_impl",
    "restore_flash_attention_impl", "current_flash_attention_impl",
)  # fmt: skip
# The arguments of aten's schemas that are read here; any other must be what it is by default.
_KNOWN = {
    *("query", "key", "value", "out", "grad_out", "logsumexp", "max_q", "max_k", "scale"),
    *("cum_seq_q", "cum_seq_k", "dropout_p", "is_causal", "return_debug_mask", "seqused_k"),
    *("window_size_left", "window_size_right", "alibi_slopes", "block_table", "num_splits"),
    *("rng_state", "unused", "philox_seed", "philox_offset"),  # of dropout alone
}
_Given = dict[str, Any]  # a call's arguments by the names of the schema
_before: str | None = None  # the implementation that was active
_taken: Counter[str] = Counter()
_passed: Counter[tuple[str, str]] = Counter()
_lock = threading.Lock()  # backwards run in threads of their own
# Of `_quick`'s calls, by what they depend on: their plans, of results with heads before tokens.
_plans: Plans[run.AttentionPlan] = Plans()
_nothings: dict[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
_empty_like, _is_debugging = torch.empty_like, common.is_debugging


class SdpaReport(NamedTuple):
    """What came to the door: calls taken by aten's op, calls passed on by op and reason."""

    is_active: bool
    taken: dict[str, int]
    passed: dict[str, dict[str, int]]

    def __str__(self) -> str:
        lines = [f"kernel_hub for SDPA: {'active' if self.is_active else 'not active'}"]
        lines += [f"  {op}: {count} taken" for op, count in sorted(self.taken.items())]
        for op, reasons in sorted(self.passed.items()):
            lines += [f"  {op}: {n} passed on: {why}" for why, n in sorted(reasons.items())]
        lines.append(
            "  Not counted: what torch gives to another backend before it asks for flash "
            "(an attn_mask, fp32, causal of unequal lengths, a head_dim of v's own), and all on "
            "the CPU."
        )
        return "\n".join(lines)


def activate() -> None:
    """Let torch's attention on CUDA tensors run kernel_hub's kernels, until `restore()`.

    `F.scaled_dot_product_attention`, nested tensors and `torch.nn.attention.varlen` among them,
    forward and backward, also inside torch.compile (activate first: a graph keeps the backend that
    it was traced with). Where torch would ask cuDNN first (Hopper, Blackwell), flash is put first.
    Dropout and whatever else `ops.flash_attention` does not take runs as before. Uses the GPU once,
    if there is one, so that torch settles its order of backends. A second call changes nothing.
    Raises KernelHubError where torch is older than 2.10.
    """
    global _before
    attention = _torch_attention()
    current = attention.current_flash_attention_impl()
    if current == NAME:
        return
    attention.register_flash_attention_impl(NAME, register_fn=_register)
    try:
        attention.activate_flash_attention_impl(NAME)
    except BaseException:
        if current is not None:  # torch took it out before it asked for ours
            attention.activate_flash_attention_impl(current)
        raise
    _before = current


def restore() -> None:
    """Undo `activate()`: kernels, the order of backends, the implementation that was active."""
    global _before
    attention = _torch_attention()
    if attention.current_flash_attention_impl() == NAME:
        attention.restore_flash_attention_impl()
        before, _before = _before, None
        if before is not None:
            attention.activate_flash_attention_impl(before)


def report() -> SdpaReport:
    """The calls since the process began."""
    is_there = all(hasattr(torch.nn.attention, name) for name in _NEEDED)
    is_active = is_there and torch.nn.attention.current_flash_attention_impl() == NAME
    with _lock:
        passed: dict[str, dict[str, int]] = {}
        for (op, reason), count in _passed.items():
            passed.setdefault(op, {})[reason] = count
        return SdpaReport(is_active, dict(_taken), passed)


def _torch_attention() -> Any:
    missing = [name for name in _NEEDED if not hasattr(torch.nn.attention, name)]
    if not hasattr(torch.library, "get_kernel"):
        missing.append("torch.library.get_kernel")
    if missing:
        raise KernelHubError(
            f"sdpa: expected torch 2.10 or later, found {torch.__version__}, which has no "
            f"{missing[0]}: upgrade torch, or call kernel_hub.ops.flash_attention"
        )
    return torch.nn.attention


class _NotOursError(Exception):
    """A call that another kernel has to take; its text is the reason."""


class _Handle:
    """What is registered, until `remove()`; torch's registry holds it."""

    def __init__(self, key: str) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        self._orders: tuple[list[int], list[int]] | None = None
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Warning only once for all operators")
                for name, take in _TAKERS.items():
                    if hasattr(torch.ops.aten, name):
                        kernel = _door(name, take, key)
                        if name == _SDPA:
                            kernel = _quick(kernel)
                        self._library.impl(name, kernel, key, with_keyset=True)
            self._put_flash_first()
        except BaseException:
            self.remove()
            raise

    def _put_flash_first(self) -> None:
        if torch.cuda.is_available():
            # The first choice that torch makes in a process overwrites the order.
            x = torch.empty(1, 1, 16, 64, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(x, x, x)
        before = list(torch._C._get_sdp_priority_order())
        ours = [_FLASH, *(backend for backend in before if backend != _FLASH)]
        torch._C._set_sdp_priority_order(ours)
        self._orders = before, ours

    def remove(self) -> None:
        """Take everything back; an order that somebody has set meanwhile stays."""
        self._library._destroy()
        if self._orders is not None:
            before, ours = self._orders
            if list(torch._C._get_sdp_priority_order()) == ours:
                torch._C._set_sdp_priority_order(before)
            self._orders = None


def _register(key: str = "CUDA") -> _Handle:
    return _Handle(key)


def _door(name: str, take: Callable[[_Given], Any], key: str) -> Callable[..., Any]:
    """The kernel registered for `name`: ours, or what `key` had before."""
    before = None
    with contextlib.suppress(RuntimeError):  # a torch built without CUDA has none
        before = torch.library.get_kernel(f"aten::{name}", key)
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    names = [each.name for each in arguments if not each.kwarg_only]
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    strange = [each.name for each in arguments if each.name not in _KNOWN]

    def kernel(keyset: Any, *args: Any, **named: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **named}
        try:
            for each in strange:
                if given[each] is not defaults.get(each):
                    raise _NotOursError(f"{each}, which is new")
            found = take(given)
        except _NotOursError as refused:
            reason = str(refused)
        else:
            with _lock:
                _taken[name] += 1
            return found
        with _lock:
            _passed[name, reason] += 1
        if before is None:
            raise KernelHubError(f"aten::{name}: {reason}, and no other kernel is there to run it")
        return before.call_boxed(keyset, *args, **named)

    return kernel


def _quick(door: Callable[..., Any]) -> Callable[..., Any]:
    """`door` of F.scaled_dot_product_attention, whose calls come again and again: one that was seen
    before is launched at once, without transposing, in 0.4 of the time."""

    def kernel(
        keyset: Any, q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False,
        return_debug_mask: bool = False, scale: float | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        options = Options(is_causal, scale)
        at, key = run.addresses_and_key(q, k, v, None, options, (run.sm90.is_enabled,))
        plan = _plans.get(key)
        maps = None if plan is None else plan.spans.apart.get(at)
        is_other = dropout_p or return_debug_mask or more or _is_debugging()
        if plan is None or maps is None or is_other:
            options_given = {"scale": scale, **more}
            found = door(keyset, q, k, v, dropout_p, is_causal, return_debug_mask, **options_given)
            if plan is None and q.dtype is not torch.float32 and q.dim() == 4:
                turned = _tokens_first(q, k, v)
                met = run.plan_of(turned[0], turned[1], turned[2], True, options)
                if met is not None and met.out is not None:
                    made = common.emptied(_empty_like(met.out).transpose(1, 2))
                    _plans.keep(key, met._replace(out=made))
            return found
        out, lse = _empty_like(plan.out), _empty_like(plan.lse)
        run.launch(plan.launch, maps, q, k, v, out, lse, options)
        with _lock:
            _taken[_SDPA] += 1
        return out, lse, None, None, q.shape[2], k.shape[2], *_unused(q)

    return kernel


def _ours(options: Options, q: Any, k: Any, v: Any, call: Callable[..., Any], *rest: Any) -> Any:
    """call(q, k, v, *rest, options), unless the op lacks what it takes."""
    if q.dtype == torch.float32:  # of which the op has no gradients
        raise _NotOursError("q: expected dtype float16 or bfloat16")
    try:
        return call(q, k, v, *rest, options)
    except CubinNotFoundError:
        raise _NotOursError("no kernel for this GPU") from None
    except TensorError:
        try:
            checks.resolve(_OP, q, k, v, options)
        except TensorError as error:
            reason = str(error).removeprefix(f"{_OP}: ").partition(", found")[0]
            raise _NotOursError(reason) from None
        raise


def _options(given: _Given) -> Options:
    """What a call says besides its tensors, as `ops.flash_attention` takes it."""
    if given["dropout_p"]:
        raise _NotOursError("dropout_p is not 0")
    if given.get("return_debug_mask"):
        raise _NotOursError("return_debug_mask")
    if given.get("num_splits") == 1:
        raise _NotOursError("num_splits=1, which promises the same bits in any batch")
    cum_seq_q, cum_seq_k = given.get("cum_seq_q"), given.get("cum_seq_k")
    block_table, lengths = given.get("block_table"), given.get("seqused_k")
    if block_table is not None:
        if lengths is None and cum_seq_k is not None:
            lengths = cum_seq_k.diff()
        cum_seq_k = None
    elif lengths is not None and cum_seq_k is not None:
        raise _NotOursError("seqused_k beside cum_seq_k")
    left, right = given.get("window_size_left"), given.get("window_size_right")
    varies = cum_seq_k is not None or lengths is not None
    return Options(
        given["is_causal"], given["scale"], (-1 if left is None else left,
        -1 if right is None else right), 0.0, given.get("alibi_slopes"), cum_seq_q, cum_seq_k,
        None if cum_seq_q is None else given["max_q"], given["max_k"] if varies else None,
        block_table, lengths,
    )  # fmt: skip


def _attend(q: Any, k: Any, v: Any, out: Any, options: Options) -> tuple[Any, Any]:
    return run.forward(_OP, q, k, v, out, True, options)


def _unused(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The random state and the debug mask, which nobody reads without dropout: always the same."""
    key = q.device, q.dtype
    found = _nothings.get(key)
    if found is None:
        with torch.inference_mode(False):  # gradients may save them in any mode
            seed = torch.empty(2, dtype=torch.uint64, device=q.device)
            offset = torch.empty((), dtype=torch.uint64, device=q.device)
            found = _nothings[key] = seed, offset, torch.empty(0, dtype=q.dtype, device=q.device)
    return found


def _qkv(given: _Given) -> tuple[Any, Any, Any]:
    return given["query"], given["key"], given["value"]


def _tokens_first(*tensors: Any) -> list[Any]:
    """(batch, heads, tokens, head_dim) -> (batch, tokens, heads, head_dim)."""
    if any(x.dim() != 4 for x in tensors):
        raise _NotOursError("not of 4 dimensions")
    return [x.transpose(1, 2) for x in tensors]


def _forward(given: _Given) -> tuple[Any, ...]:
    qkv = _qkv(given)
    return *_ours(_options(given), *qkv, _attend, given.get("out")), *_unused(qkv[0])


def _sdpa(given: _Given) -> tuple[Any, ...]:
    q, k, v = _tokens_first(*_qkv(given))
    out, lse = _ours(_options(given), q, k, v, _attend, None)
    return out.transpose(1, 2), lse, None, None, q.shape[1], k.shape[1], *_unused(q)


def _differentiate(
    q: Any, k: Any, v: Any, dout: Any, out: Any, lse: Any, grads: Any, options: Options
) -> None:
    plan = run.plan_of(q, k, v, True, options)  # of a forward that was checked
    numbers = checks.resolve(_OP, q, k, v, options) if plan is None else plan.numbers
    is_ragged = options.cu_seqlens_q is not None
    shape = (q.shape[1], q.shape[0]) if is_ragged else (numbers[0], q.shape[2], q.shape[1])
    if lse.dtype != torch.float32 or tuple(lse.shape) != shape:
        raise _NotOursError("a logsumexp that is not laid out as ours")
    shape = (*q.shape[:-1], v.shape[-1])
    if not dout.dtype == out.dtype == q.dtype or not dout.shape == out.shape == shape:
        raise _NotOursError("gradients or outputs that are not like query and value")
    out, lse = (x if x.stride(-1) == 1 else x.contiguous() for x in (out, lse))
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    run.backward(_OP, dout, (q, k, v), out, lse, grads, is_deterministic, options, plan)


def _backward(given: _Given, turn: Callable[..., Any] = lambda *x: x) -> tuple[Any, ...]:
    qkv = _qkv(given)
    grads = tuple(torch.empty_like(x) for x in qkv)
    rest = *turn(given["grad_out"], given["out"]), given["logsumexp"], turn(*grads)
    _ours(_options(given), *turn(*qkv), _differentiate, *rest)
    return grads


_TAKERS: dict[str, Callable[[_Given], Any]] = {
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": lambda given: _forward(given)[1],
    "_flash_attention_backward": _backward,
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": lambda given: _backward(given, _tokens_first),
}
