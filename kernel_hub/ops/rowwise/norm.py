"""Norms of rows with all that may be joined to them: check, plan and launch, for ops of any kind of
norm whose kernels have the parameters of csrc/rowwise/norm.cuh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...errors import KernelHubError, TensorError
from ..core import common
from ..core.device import device_of
from ..core.launch import GIVEN, Launch, Plans, call_first
from .norm_shapes import Joined, choose_joined, scalar_choice

E4M3 = torch.float8_e4m3fn
# What results may be quantised to, each row by a scale of its own: its largest number.
QUANTISED: dict[torch.dtype, float] = {E4M3: 448.0, torch.int8: 127.0}
# Of the largest magnitude of a row.
_LEAST = 1e-12
_NAMES = "out out_scale residual_out x weight bias residual"
_IN_PLACE = "out=x out=residual residual_out=x residual_out=residual"
_empty_like = torch.empty_like


class NormGiven(NamedTuple):
    """What a call reads, as the registered ops name it."""

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    eps: float
    weight_offset: float
    adds_after: bool
    batch_invariant: bool = False


class Outs(NamedTuple):
    """What a call writes; None where it is not asked for."""

    out: Any
    out_scale: Any
    residual_out: Any


class Norm:
    """A norm, in every form.

    op: its name to callers; kernels: of its cubin, of the functions in it and of the registered op;
    num_sums: along a row; normed: (s in fp32, eps) -> what weight
    and bias are for, on the CPU.
    """

    def __init__(
        self, op: str, *, kernels: str, num_sums: int,
        normed: Callable[[torch.Tensor, float], torch.Tensor],
    ) -> None:  # fmt: skip
        self.op, self.kernels = op, kernels
        self.num_sums, self.normed = num_sums, normed
        # A bare tuple of a launch: unpacking it takes 40 ns less.
        self.plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
        self.plain_plans: Plans[Any] = Plans()
        names = ["x", "weight", "bias", "residual", "out", "out_scale", "residual_out"]
        self.operands = common.Operands(op, names[0], " ".join(names[1:]))
        self.writes = common.Writes(op, _NAMES, "out out_scale residual_out", in_place=_IN_PLACE)
        self.registered = common.define_pair(
            kernels,
            "Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, "
            "float weight_offset, bool adds_after, bool batch_invariant",
            "out out_scale residual_out", more="ScalarType? out_dtype",
            new=lambda *given: _filled(self.new(NormGiven(*given[:8]), given[8], _NO_OUTS)),
            # By their names at each call: a test gives one another's.
            cuda=lambda *given: cuda_into(self, *_split(given)),
            cpu=lambda *given: cpu_into(self, *_split(given)),
            check=lambda *given: self.check(NormGiven(*given[:8]), Outs(*given[8:])),
        )  # fmt: skip

    def __call__(self, given: NormGiven, out_dtype: torch.dtype | None, outs: Outs) -> Any:
        """One call: (out, out_scale, residual_out), without those that are not asked for."""
        common.check_flag(self.op, "adds_after", given.adds_after)
        given = given._replace(
            eps=common.check_number(self.op, "eps", given.eps, least=0.0),
            weight_offset=common.check_number(self.op, "weight_offset", given.weight_offset),
            adds_after=bool(given.adds_after),
        )
        x, tensors = given.x, (given.x, given.weight, given.bias, given.residual, *outs)
        required, optional = tensors[:1], tensors[1:]
        is_plain = self.operands.are_plain(required, optional)
        is_given = outs != _NO_OUTS
        try:
            self.check_asked(given, out_dtype, outs)
            if not is_plain and not is_given:
                made = Outs(*self.registered.returning(*given, out_dtype))
            else:
                made = self.new(given, out_dtype, outs)
                if is_plain:
                    (cuda_into if x.is_cuda else cpu_into)(self, given, made, is_given)
                else:
                    self.registered.writing(*given, *_filled(made))
        except common.FOREIGN:
            self.operands.check_tensors(required, optional)
            self.check(given, outs)
            raise
        if is_given and is_plain:
            common.written(tuple([out for out in outs if out is not None]))
        adds_before = given.residual is not None and not given.adds_after
        asked = (True, made.out.dtype in QUANTISED, adds_before)
        found = tuple([out for out, is_asked in zip(made, asked, strict=True) if is_asked])
        return found if len(found) > 1 else found[0]

    def cuda_plain(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
        weight_offset: float, batch_invariant: bool,
    ) -> torch.Tensor:  # fmt: skip
        """A CUDA tensor into a new one of its dtype, without a residual: the quick way through
        eager calls."""
        low_bits, layout = x.data_ptr(), [x.dtype, x.shape, x.is_contiguous() or x.stride()]
        for parameter in (weight, bias):
            if parameter is None:
                layout.append(None)
            else:
                low_bits |= parameter.data_ptr()
                layout += parameter.dtype, parameter.shape, parameter.stride()
        low_bits &= 15
        key = (low_bits, x.get_device(), batch_invariant, *layout)
        plan = self.plain_plans.get(key)
        if plan is not None:
            found: torch.Tensor = plan(x, weight, bias, eps, weight_offset)
            return found
        given = NormGiven(x, weight, bias, None, eps, weight_offset, False, batch_invariant)
        self.check(given, _NO_OUTS)
        new, one = _empty_like(x), GIVEN
        launch = self.plan(given, Outs(new, None, None), low_bits)
        params = (None, None, one, None, one, one, *launch.numbers, one, one)
        return call_first(
            self.plain_plans, key, launch, new, params, x, weight, bias, eps, weight_offset
        )

    def check_asked(self, given: NormGiven, out_dtype: Any, outs: Outs) -> None:
        """What of the results is asked for must be what there is."""
        op, out, dtype = self.op, outs.out, given.x.dtype
        if out_dtype is not None:
            common.check_dtype(op, "out_dtype", out_dtype, (dtype, *QUANTISED))
            if out is not None and out.dtype != out_dtype:
                raise common.refuse(op, "out", f"dtype {str(out_dtype)[6:]}, as out_dtype", out)
            dtype = out_dtype
        elif out is not None:
            dtype = out.dtype
        if given.adds_after and dtype in QUANTISED:
            argument, found = ("out", out) if out_dtype is None else ("out_dtype", dtype)
            expected = f"dtype {given.x.dtype}, as adds_after is set"
            raise common.refuse(op, argument, expected, found)
        if dtype not in QUANTISED and outs.out_scale is not None:
            raise TensorError(f"{op}: out_scale is given, but out is not quantised")

    def new(self, given: NormGiven, out_dtype: torch.dtype | None, outs: Outs) -> Outs:
        """What is written: what is given, or new tensors; None where it is not asked for."""
        out, out_scale, residual_out = outs
        if out is None:
            out = _empty_like(given.x, dtype=out_dtype)
        if out_scale is None and out.dtype in QUANTISED:
            out_scale = given.x.new_empty(given.x.shape[:-1], dtype=torch.float32)
        if residual_out is None and given.residual is not None and not given.adds_after:
            residual_out = _empty_like(given.residual)
        return Outs(out, out_scale, residual_out)

    def check(self, given: NormGiven, outs: Outs) -> None:
        """Everything about the tensors but their addresses."""
        op, x = self.op, given.x
        common.check_data(op, "x", x)
        hidden_size = x.shape[-1]
        if hidden_size > common.MAX_SIZE:
            raise common.refuse(op, "x", f"a last dimension of at most {common.MAX_SIZE}", x)
        dtypes: tuple[torch.dtype, ...] = (x.dtype, torch.float32)
        parameters: Any = (("weight", given.weight), ("bias", given.bias))
        for argument, value in parameters:
            if value is not None:
                common.check_like(op, argument, value, (hidden_size,), x, dtypes=dtypes)
                dtypes = (value.dtype,)
        if given.residual is not None:
            common.check_like(op, "residual", given.residual, x.shape, x)
        elif given.adds_after:
            raise TensorError(f"{op}: adds_after is set without residual")
        residual_out = _there(outs.residual_out)
        if residual_out is not None and (given.residual is None or given.adds_after):
            raise TensorError(f"{op}: residual_out is given without a residual added before")
        for argument, value, shape, dtypes in (
            ("out", outs.out, x.shape, (x.dtype, *QUANTISED)),
            ("out_scale", _there(outs.out_scale), x.shape[:-1], (torch.float32,)),
            ("residual_out", residual_out, x.shape, (x.dtype,)),
        ):
            if value is not None:
                common.check_like(op, argument, value, shape, x, dtypes=dtypes)
                common.check_output(op, argument, value)
        if given.adds_after and outs.out is not None and outs.out.dtype in QUANTISED:
            raise common.refuse(op, "out", f"dtype {x.dtype}, as adds_after is set", outs.out)

    def check_all_there(self, given: NormGiven, outs: Outs) -> None:
        """A kernel writes all that it computes."""
        nothing = "None, or a tensor without elements"
        if outs.out.dtype in QUANTISED and outs.out_scale is None:
            raise common.refuse(self.op, "out_scale", "a scale of each row, for this out", nothing)
        if given.residual is not None and not given.adds_after and outs.residual_out is None:
            raise common.refuse(self.op, "residual_out", "a tensor like x", nothing)

    def plan(self, given: NormGiven, outs: Outs, low_bits: int) -> Launch:
        """Check the tensors and choose the kernel, its launch shape and its numbers."""
        self.check(given, outs)
        x, residual, (out, out_scale, residual_out) = given.x, given.residual, outs
        if x.numel() == 0:
            return Launch()
        self.check_all_there(given, outs)
        # Of what is absent, the strides of x: nothing is read by them.
        places = [
            out.stride()[:-1],
            x.stride()[:-1] if out_scale is None else out_scale.stride(),
            *[(x if t is None else t).stride()[:-1] for t in (residual_out, x, residual)],
        ]
        outer, rows, pairs = common.split_rows(self.op, x.shape[:-1], places)
        strides = [stride for outer_stride, stride in pairs for stride in (stride, outer_stride)]
        elems, hidden_size = common.VEC_BYTES // x.element_size(), x.shape[-1]
        others = (*strides[:2], *strides[4:])  # a scale is written alone
        if low_bits or not common.is_aligned(elems, hidden_size, *others):
            variant, threads, rows_a_block = scalar_choice(hidden_size)
        else:
            gpu = device_of(x.device)
            is_quantised = out.dtype in QUANTISED
            waits = is_quantised or self.num_sums > 1
            joined = Joined(waits, is_quantised, residual is not None, given.adds_after)
            variant, threads, rows_a_block = choose_joined(
                hidden_size // elems, rows * outer, joined, given.batch_invariant, gpu.num_sms
            )
        form = "_quantised" if out.dtype in QUANTISED else ""
        name = f"{self.kernels}_{common.DTYPE_TOKENS[x.dtype]}{form}_{variant}"
        function = common.shipped(self.kernels, name)
        parameter = given.bias if given.weight is None else given.weight
        is_weight32 = parameter is not None and parameter.dtype == torch.float32
        flags = (is_weight32, given.adds_after, out.dtype == torch.int8)
        numbers = (*strides, rows, hidden_size, *map(int, flags))
        grid = (-(-rows // rows_a_block), outer, 1)
        block = (threads, rows_a_block, 1)
        options = device_of(x.device).following
        return Launch(function, grid, block, numbers=numbers, options=options)


def cuda_into(norm: Norm, given: NormGiven, outs: Outs, is_given: bool = True) -> None:
    """The norm of a CUDA tensor. is_given: the caller gave what is written."""
    out, out_scale, residual_out = outs = Outs(*map(_there, outs))
    x, weight, bias, residual, eps, weight_offset, adds_after, batch_invariant = given
    tensors = (out, out_scale, residual_out, x, weight, bias, residual)
    addresses = tuple([t.data_ptr() for t in tensors if t is not None])
    low_bits = 0
    for address in addresses:
        low_bits |= address
    low_bits &= 15
    layout = [None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors]
    key = (low_bits, adds_after, batch_invariant, *layout)
    found = norm.plans.get(key)
    if found is None:
        plan = tuple(norm.plan(given, outs, low_bits))
        found = norm.plans.keep(key, (plan, norm.writes.spans(*tensors)))
    (function, grid, block, shared_bytes, numbers, _, options), spans = found
    if is_given and addresses not in spans.apart:
        spans.check(addresses)
    params = (
        out, out_scale, residual_out, x, residual, weight, bias, *numbers, eps,
        weight_offset,
    )  # fmt: skip
    try:
        function(grid, block, shared_bytes, None, params, **options)
    except KernelHubError:
        norm.check(given, outs)  # the launch checks devices and dtypes; this names them
        raise


def cpu_into(norm: Norm, given: NormGiven, outs: Outs, is_given: bool = True) -> None:
    """The same on the CPU, by torch."""
    out, out_scale, residual_out = outs = Outs(*map(_there, outs))
    x, weight, bias, residual, eps, weight_offset, adds_after, _ = given
    norm.check(given, outs)
    if is_given:
        norm.writes.check(*outs, x, weight, bias, residual)
    if x.numel() == 0:
        return
    norm.check_all_there(given, outs)
    if residual_out is not None:
        x = residual_out.copy_(x + residual)
    normed = norm.normed(x.float(), eps)
    if weight is not None or weight_offset:
        normed = normed * ((1.0 if weight is None else weight.float()) + weight_offset)
    if bias is not None:
        normed = normed + bias.float()
    if adds_after and residual is not None:
        normed = normed + residual.float()
    if out_scale is None:
        out.copy_(normed)
        return
    quantised_rows(normed, out, out_scale)


def quantised_rows(values: torch.Tensor, out: torch.Tensor, out_scale: torch.Tensor) -> None:
    """`values` in fp32 rounded into `out`, each row by its scale, on the CPU."""
    largest = values.abs().amax(-1, keepdim=True).clamp_min(_LEAST)
    most = QUANTISED[out.dtype]
    out_scale.copy_((largest / most).squeeze(-1))
    scaled = (values * (most / largest)).clamp(-most, most)
    out.copy_(scaled.round() if out.dtype == torch.int8 else scaled)


_NO_OUTS = Outs(None, None, None)


def _split(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of a registered op's arguments: (what it reads, what it writes, what is left)."""
    return NormGiven(*given[:8]), Outs(*given[8:11]), *given[11:]


def _filled(outs: Outs) -> Outs:
    """With tensors without elements for None, as registered ops return tensors alone."""
    return Outs(*[outs.out.new_empty(0) if out is None else out for out in outs])


def _there(out: Any) -> Any:
    """An output that is asked for, else None: tensors without elements stand for it."""
    return None if isinstance(out, torch.Tensor) and out.shape == (0,) else out
