"""RMS normalisation of rows, with an optional fused residual add (csrc/rowwise/rms_norm.cu).

What more may be joined to it goes by csrc/rowwise/rms_norm_joined.cu.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from ...errors import KernelHubError, TensorError
from ..core import common
from ..core.device import device_of
from ..core.launch import GIVEN, Launch, Plans, call_first
from .norm import QUANTISED, Norm, NormGiven, Outs
from .norm_shapes import choose, is_few, scalar_choice

_OP = "rms_norm"
# What a call's shapes, strides and alignment were checked and planned to be: the other way than the
# quick one has a launch, bare (unpacking it takes 40 ns less), and how far its tensors reach.
_plain_plans: Plans[Any] = Plans()
_plans: Plans[Any] = Plans()
_operands = common.Operands(_OP, "x weight", "residual out residual_out")
_writes = common.Writes(
    _OP, "out residual_out x residual weight", "out residual_out",
    in_place="out=x out=residual residual_out=x residual_out=residual",
)  # fmt: skip
_PLAIN_TYPES = common.PLAIN_TYPES
_is_tracing = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_transform, _forward_ad = common.transform, common.forward_ad
_written = common.written
_empty_like = torch.empty_like
_MOST = common.MAX_NUMBER
# Up to so many rows with a residual each has threads enough for all that it reads at once: a vector
# of each from so many vectors in all on, else two. Without one four are best between _FOURS.
_SOME_ROWS, _WIDE, _MANY_VECS, _FOURS = 1024, (256, 1024), 160_000, (640, 1024)
# Rows a launch of which lets the next begin first, and up to so many vectors a thread.
_EARLY_ROWS, _EARLY = 256, {"flat_vec1": "early_vec1", "flat_vec2": "early_vec2"}


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *,
    residual: torch.Tensor | None = None, adds_after: bool = False,
    bias: torch.Tensor | None = None, weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None, residual_out: torch.Tensor | None = None,
    deterministic: bool | Literal["batch"] = False, weights_ready: bool = False,
) -> Any:  # fmt: skip
    """Normalise each row of `x` by its root mean square; optionally add a residual first.

        residual_out = x + residual                       (rounded, equal to torch's own add)
        normed = s / sqrt(mean(s**2) + eps) * (weight + weight_offset) + bias
        out = normed,  s = residual_out or x;  with adds_after: out = residual + normed,  s = x
        e4m3, int8: out_scale = max(|normed|) / 448 or 127,  out = round(normed / out_scale)

    computed in fp32 and rounded once: with a residual before, the norm is of the rounded sum, as in
    the unfused pair of ops.

    x: (..., hidden_size), fp16, bf16 or fp32, on the GPU or the CPU; last dimension contiguous, the
        leading ones in at most two separately strided groups.
    weight, bias: (hidden_size,), the dtype of x or fp32, both the same, contiguous; None is 1, 0.
    eps: added to the mean of squares; at least 0.
    residual: like x; strides of its own.
    adds_after: the residual is added to what was normed, not before (Gemma, OLMo 2).
    weight_offset: added to the weight; 1.0 for models that store weight - 1 (Gemma).
    out_dtype: None (of `out`, else of x), the dtype of x, torch.float8_e4m3fn or torch.int8: each
        row by its scale, which is nan where the row has a nan or an infinity.
    out, out_scale, residual_out: where to write: like x in out_dtype; x.shape[:-1], fp32; like x.
        out or residual_out may be x or residual itself (in place); no other overlap of what is
        written with anything else.
    deterministic: "batch": a row's bits depend on it alone, not on how many there are.
    weights_ready: a promise that nothing ahead in the stream still writes the weight, as of
        `linear`: of few rows it is read, and the launch behind may begin, before the launch ahead,
        or those that it has not waited for yet, have ended.

    Returns out; with out_scale behind it where it is quantised, and residual_out behind that where
    a residual is added before. A CUDA tensor runs the shipped cubin on torch's current stream; a
    CPU tensor runs a reference in torch. No backward. Raises TensorError naming the argument that
    does not fit.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    batch_invariant = deterministic is not False and common.is_batch(_OP, deterministic)
    if weights_ready is not False:
        common.check_flag(_OP, "weights_ready", weights_ready)
    try:
        if (
            residual is out is residual_out is bias is out_dtype is out_scale is None
            and not adds_after
            and not _is_tracing()
            and type(x) in _PLAIN_TYPES
            and weight is not None
            and type(weight) in _PLAIN_TYPES
            and x.is_cuda
            and weight.dtype is x.dtype
            and 0.0 <= eps <= _MOST
            and -_MOST <= weight_offset <= _MOST
            # What `Operands` asks of every other call.
            and _transform() is None
            and _forward_ad._current_level < 0
            and not (x.is_neg() or weight.is_neg())
            and not (_is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        ):
            return _cuda(x, weight, eps, weight_offset, batch_invariant, weights_ready)
    except common.FOREIGN:
        _operands.check_tensors((x, weight), (None, None, None))
        _check(x, None, weight)
        _numbers(eps, weight_offset)
        raise

    if (
        weight is None
        or not (bias is out_dtype is out_scale is None and adds_after is False)
        or _is_wide(x, weight)
        or (isinstance(out, torch.Tensor) and out.dtype in QUANTISED)
    ):
        how = eps, weight_offset, adds_after, batch_invariant
        given = NormGiven(x, weight, bias, residual, *how)
        return _joined(given, out_dtype, Outs(out, out_scale, residual_out))
    eps, weight_offset = _numbers(eps, weight_offset)
    if not _operands.are_plain((x, weight), (residual, out, residual_out)):
        _check(x, residual, weight, out, residual_out)
        numbers = eps, weight_offset, batch_invariant
        return _dispatch(x, residual, weight, numbers, out, residual_out)
    is_given = out is not None or residual_out is not None
    try:
        if out is None:
            out = _empty_like(x)
        if residual is not None and residual_out is None:
            residual_out = _empty_like(residual)
        into = _cuda_into if x.is_cuda else _cpu_into
        into(
            x, residual, weight, eps, weight_offset, out, residual_out, batch_invariant, is_given,
            weights_ready,
        )  # fmt: skip
    except common.FOREIGN:
        _operands.check_tensors((x, weight), (residual, out, residual_out))
        _check(x, residual, weight, out, residual_out)
        raise
    if is_given:
        _written((out,) if residual_out is None else (out, residual_out))
    return out if residual is None else (out, residual_out)


def _is_wide(x: Any, weight: Any) -> bool:
    """Whether 16-bit rows have a weight in fp32."""
    if not (isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)):
        return False
    return weight.dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16)


def _numbers(eps: Any, weight_offset: Any) -> tuple[float, float]:
    """Both, as numbers that kernels take."""
    return (
        common.check_number(_OP, "eps", eps, least=0.0),
        common.check_number(_OP, "weight_offset", weight_offset),
    )


def _check(x: Any, residual: Any, weight: Any, out: Any = None, residual_out: Any = None) -> None:
    """Everything about the tensors but their addresses."""
    common.check_data(_OP, "x", x)
    hidden_size = x.shape[-1]
    if hidden_size > common.MAX_SIZE:
        raise common.refuse(_OP, "x", f"a last dimension of at most {common.MAX_SIZE}", x)
    common.check_tensor(_OP, "weight", weight)
    if weight.dtype != x.dtype:  # fp32 beside 16 bits goes to norm.py
        dtypes = dict.fromkeys((x.dtype, torch.float32))
        raise common.refuse(_OP, "weight", f"dtype {common.named(dtypes)}", weight)
    common.check_like(_OP, "weight", weight, (hidden_size,), x)
    if residual is None and residual_out is not None:
        raise TensorError(f"{_OP}: residual_out is given without residual")
    for argument, value in (("residual", residual), ("out", out), ("residual_out", residual_out)):
        if value is not None:
            common.check_like(_OP, argument, value, x.shape, x)
            if argument != "residual":
                common.check_output(_OP, argument, value)


def _choose(
    vecs: int, rows: int, has_residual: bool, batch_invariant: bool = False, num_sms: int = 0
) -> tuple[str, int, int]:
    """As `choose`; some rows with a residual as docs/notes/rms_norm.md has measured."""
    is_some = has_residual and rows <= _SOME_ROWS and _WIDE[0] <= vecs <= _WIDE[1]
    few = batch_invariant or is_few(vecs, rows, num_sms)
    if not (has_residual or few) and _FOURS[0] < vecs < _FOURS[1]:
        return "vec4", 32 * -(-vecs // 128), 1
    if not is_some or few:  # of what is read twice few rows share a multiprocessor, and its L1
        found = choose(vecs, rows, has_residual, batch_invariant, num_sms)
        return ("loop", 1024, 1) if found[0] == "loop" else found
    each = 1 if rows * vecs >= _MANY_VECS else 2
    return f"vec{each}", 32 * -(-vecs // (32 * each)), 1


def _plan(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor,
    residual_out: torch.Tensor | None, low_bits: int, batch_invariant: bool,
    weights_ready: bool = False,
) -> Launch:  # fmt: skip
    """Check the tensors and choose the kernel, its launch shape and its integer parameters."""
    _check(x, residual, weight, out, residual_out)
    if x.numel() == 0:
        return Launch()
    hidden_size = x.shape[-1]
    tensors = [t for t in (out, residual_out, x, residual) if t is not None]
    outer, rows, pairs = common.split_rows(
        _OP, x.shape[:-1], [tensor.stride()[:-1] for tensor in tensors]
    )
    strides = [stride for outer_stride, stride in pairs for stride in (stride, outer_stride)]
    elems = common.VEC_BYTES // x.element_size()
    if low_bits or not common.is_aligned(elems, hidden_size, *strides):
        variant, threads, rows_a_block = scalar_choice(hidden_size)
    else:
        variant, threads, rows_a_block = _choose(
            hidden_size // elems, rows * outer, residual is not None, batch_invariant,
            device_of(x.device).num_sms,
        )  # fmt: skip
    # Contiguous rows take fewer parameters and no stride arithmetic.
    if variant.startswith("vec") and outer == 1 and all(t.is_contiguous() for t in tensors):
        variant, strides = f"flat_{variant}", []
        if weights_ready and residual is None and rows <= _EARLY_ROWS and x.itemsize == 2:
            variant = _EARLY.get(variant, variant)
    with_residual = "residual_" if residual is not None else ""
    name = f"rms_norm_{common.DTYPE_TOKENS[x.dtype]}_{with_residual}{variant}"
    function = common.shipped(_OP, name)
    grid = (-(-rows // rows_a_block), outer, 1)
    block = (threads, rows_a_block, 1)
    options = device_of(x.device).following
    return Launch(function, grid, block, numbers=(*strides, rows, hidden_size), options=options)


def _cuda(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float,
    batch_invariant: bool = False, weights_ready: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The plain norm of a CUDA tensor into a new one: the quick way through eager calls."""
    low_bits = (x.data_ptr() | weight.data_ptr()) & 15
    key: tuple[Any, ...] = (
        x.dtype, x.shape, weight.shape, low_bits, batch_invariant, weights_ready, x.get_device(),
    )  # fmt: skip
    if not (x.is_contiguous() and weight.is_contiguous()):
        key += x.stride(), weight.stride()
    plan = _plain_plans.get(key)
    try:
        if plan is not None:
            found: torch.Tensor = plan(x, weight, eps, weight_offset)
            return found
        new, one = _empty_like(x), GIVEN
        launch = _plan(x, None, weight, new, None, low_bits, batch_invariant, weights_ready)
        params = (one, one, *launch.numbers, one, one)
        return call_first(_plain_plans, key, launch, new, params, x, weight, eps, weight_offset)
    except KernelHubError:
        _check(x, None, weight)  # the launch checks devices and dtypes; this names them
        raise


def _cuda_into(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    weight_offset: float, out: torch.Tensor, residual_out: torch.Tensor | None,
    batch_invariant: bool = False, is_given: bool = True, weights_ready: bool = False,
) -> None:  # fmt: skip
    """The norm of a CUDA tensor into `out`, with or without a residual.

    is_given: the caller gave what is written, which may overlap the rest.
    """
    tensors = [t for t in (out, residual_out, x, residual, weight) if t is not None]
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    low_bits = 0
    for address in addresses:
        low_bits |= address
    low_bits &= 15
    layout = [(tensor.shape, tensor.stride()) for tensor in tensors]
    how = batch_invariant, weights_ready
    key = (x.dtype, low_bits, *how, *layout)
    plan, spans = _plans.get(key) or _plans.keep(
        key,
        (
            tuple(_plan(x, residual, weight, out, residual_out, low_bits, *how)),
            _writes.spans(out, residual_out, x, residual, weight),
        ),
    )
    if is_given and addresses not in spans.apart:
        spans.check(addresses)
    function, grid, block, shared_bytes, numbers, _, options = plan
    try:
        params = (*tensors, *numbers, eps, weight_offset)
        function(grid, block, shared_bytes, None, params, **options)
    except KernelHubError:
        _check(x, residual, weight, out, residual_out)
        raise


def _cpu_into(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    weight_offset: float, out: torch.Tensor, residual_out: torch.Tensor | None,
    batch_invariant: bool = False, is_given: bool = True, weights_ready: bool = False,
) -> None:  # fmt: skip
    """The same on the CPU, by torch."""
    _check(x, residual, weight, out, residual_out)
    if is_given:
        _writes.check(out, residual_out, x, residual, weight)
    if residual is not None and residual_out is not None:
        x = residual_out.copy_(x + residual)
    s = x.float()
    scale = torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    out.copy_(s * scale * (weight.float() + weight_offset))


def _dispatch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor,
    numbers: tuple[float, float, bool], out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
) -> Any:  # fmt: skip
    """Through torch's dispatcher, for tracing and for tensors that are not plain."""
    scalars, batch_invariant = numbers[:2], numbers[2]
    if residual is None:
        if out is None:
            return _op(x, weight, *numbers)
        _op_out(x, weight, *scalars, out, batch_invariant)
        return out
    if out is None and residual_out is None:
        return _op_residual(x, residual, weight, *numbers)
    out = _empty_like(x) if out is None else out
    residual_out = _empty_like(residual) if residual_out is None else residual_out
    _op_residual_out(x, residual, weight, *scalars, out, residual_out, batch_invariant)
    return out, residual_out


_DeviceWay = Any  # _cuda_into or _cpu_into


def _returning(into: _DeviceWay) -> Any:
    def run(
        x: Any, weight: Any, eps: float, weight_offset: float, batch_invariant: bool = False
    ) -> torch.Tensor:
        out = _empty_like(x)
        into(x, None, weight, eps, weight_offset, out, None, batch_invariant, False)
        return out

    return run


def _returning_both(into: _DeviceWay) -> Any:
    def run(
        x: Any, residual: Any, weight: Any, eps: float, weight_offset: float,
        batch_invariant: bool = False,
    ) -> Any:  # fmt: skip
        out, residual_out = _empty_like(x), _empty_like(residual)
        into(x, residual, weight, eps, weight_offset, out, residual_out, batch_invariant, False)
        return out, residual_out

    return run


def _writing(into: _DeviceWay) -> Any:
    def run(
        x: Any, weight: Any, eps: float, weight_offset: float, out: Any,
        batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        into(x, None, weight, eps, weight_offset, out, None, batch_invariant)

    return run


def _fake_into(
    x: Any, residual: Any, weight: Any, eps: float, offset: float, out: Any, residual_out: Any,
    batch_invariant: bool = False, is_given: bool = True,
) -> None:  # fmt: skip
    _check(x, residual, weight, out, residual_out)


_SCALARS, _FLAG = "float eps, float weight_offset", "bool batch_invariant=False"
_op = common.define(
    f"rms_norm(Tensor x, Tensor weight, {_SCALARS}, {_FLAG}) -> Tensor",
    cuda=_cuda, cpu=_returning(_cpu_into), fake=_returning(_fake_into),
)  # fmt: skip
_op_out = common.define(
    f"rms_norm_out(Tensor x, Tensor weight, {_SCALARS}, Tensor(a!) out, {_FLAG}) -> ()",
    cuda=_writing(_cuda_into), cpu=_writing(_cpu_into), fake=_writing(_fake_into),
)  # fmt: skip
_op_residual = common.define(
    f"rms_norm_residual(Tensor x, Tensor residual, Tensor weight, {_SCALARS}, {_FLAG}) -> "
    "(Tensor, Tensor)",
    cuda=_returning_both(_cuda_into), cpu=_returning_both(_cpu_into),
    fake=_returning_both(_fake_into),
)  # fmt: skip
_op_residual_out = common.define(
    f"rms_norm_residual_out(Tensor x, Tensor residual, Tensor weight, {_SCALARS}, "
    f"Tensor(a!) out, Tensor(b!) residual_out, {_FLAG}) -> ()",
    cuda=_cuda_into, cpu=_cpu_into, fake=_fake_into,
)  # fmt: skip


_joined = Norm(
    _OP,
    kernels="rms_norm_joined",
    num_sums=1,
    normed=lambda s, eps: s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps),
)
