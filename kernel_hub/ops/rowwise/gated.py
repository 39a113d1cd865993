"""Activations, gated or not, results of a dtype or e4m3 with a scale a row: check, plan and launch,
for any op whose kernels have the parameters of csrc/rowwise/gated.cuh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import KernelHubError, TensorError
from ..core import common
from ..core.device import device_of
from ..core.launch import GIVEN, Launch, Plans, call_first
from .norm import E4M3, quantised_rows
from .norm_shapes import choose, scalar_choice

# What `approximate` of a GELU may be -> whether it is by tanh.
GELU_FORMS = {"none": False, "tanh": True}
# Of a block where vectors are few, and else; of a multiprocessor. Elements of a short row.
_FEW_THREADS, _THREADS, _THREADS_AN_SM, _SHORT = 128, 256, 2048, 256
# Vectors of rows of which four a thread are enough; of all rows, so that wider ones want eight; of
# rows that have a multiprocessor alone with four a thread; of which it holds two with eight.
_WIDE, _MANY_VECS, _ALONE, _PAIRED = 512, 1_200_000, 2048, 2560
_empty, _empty_like = torch.empty, torch.empty_like
_is_quick = common.is_quick


def threads_of_vecs(vecs: int, rows: int, parts: int) -> int:
    """Threads a block, each with one 16-byte vector of output, for rows of `vecs` of them.

    Measured on an H200 (docs/notes/silu_and_mul.md): few rows want many small blocks, many rows as
    few blocks a row as there can be; where nothing is multiplied, blocks of 256.
    """
    most = _FEW_THREADS if rows <= 256 else _THREADS if parts == 1 else 1024
    blocks = -(-vecs // most)
    return 32 * -(-vecs // (32 * blocks))


def threads_of_whole(vecs: int, num_sms: int) -> int:
    """Threads a block for `vecs` vectors that are no rows: few while all run at once."""
    return _FEW_THREADS if vecs <= _THREADS_AN_SM * num_sms else _THREADS


def choose_of_rows(vecs: int, rows: int, parts: int, has_wide: bool) -> tuple[str, int, int]:
    """(variant, threads a row, rows a block) for rows into e4m3, of `vecs` 16-byte vectors.

    has_wide: there are kernels of eight vectors a thread. Measured on an H200
    (docs/notes/gelu_and_mul.md): many rows want as few threads a block as hold a row in four
    vectors each; in eight wide ones of one part, which stay as they were read, and of two parts
    those of which a multiprocessor then has two blocks, not one.
    """
    if rows <= 256 or vecs <= 32 or vecs > 4 * 1024:
        return choose(vecs, rows, True)
    per_thread = 2 if vecs <= 64 else 4
    if has_wide and (
        _ALONE < vecs <= _PAIRED
        if parts == 2
        else vecs > _ALONE or (vecs > _WIDE and rows * vecs >= _MANY_VECS)
    ):
        per_thread = 8
    threads = 32 * -(-vecs // (32 * per_thread))
    return f"vec{per_thread}", threads, max(1, 64 // threads)


class Gated:
    """One activation.

    op: its name to callers, of its cubin and of the registered ops; options: the schema of what
    follows x; numbers: what kernels take of them; parts: of a row of x, for a row of results, 2
    where it is gated; has_wide: of 16 bits into e4m3 there are kernels of eight vectors a thread;
    formula: (x in fp32, *options) -> what is rounded, on the CPU.
    """

    def __init__(
        self, op: str, options: str = "", *, formula: Callable[..., torch.Tensor],
        numbers: Callable[..., tuple[float, ...]] = lambda *options: (), parts: int = 2,
        has_wide: bool = True,
    ) -> None:  # fmt: skip
        self.op, self.formula, self.numbers, self.parts = op, formula, numbers, parts
        self.has_wide = has_wide
        # A bare tuple of a launch: unpacking it takes 40 ns less.
        self.plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
        self.plain_plans: Plans[Any] = Plans()
        self.operands = common.Operands(op, "x", "out out_scale")
        self.writes = common.Writes(
            op, "out out_scale x", "out out_scale", in_place="out=x" if parts == 1 else ""
        )
        inputs = f"Tensor x, {options}" if options else "Tensor x"
        last = 1 + inputs.count(",")  # the place of out

        # By their names at each call: a test gives one another's.
        def cuda(*given: Any) -> None:
            cuda_into(self, given[0], given[1:last], *given[last:])

        def cpu(*given: Any) -> None:
            cpu_into(self, given[0], given[1:last], *given[last:])

        def without_scale(into: Callable[..., None]) -> Callable[..., None]:
            return lambda *given: into(*given[: last + 1], None, *given[last + 1 :])

        self.registered = common.define_pair(
            op, inputs, new=lambda x, *options: self.new_out(x),
            cuda=without_scale(cuda), cpu=without_scale(cpu),
            check=lambda *given: self.check_whole(given[0], given[last], None),
        )  # fmt: skip
        self.registered_e4m3 = common.define_pair(
            f"{op}_e4m3", inputs, "out out_scale",
            new=lambda x, *options: (self.new_out(x, E4M3), self.new_scale(x)),
            cuda=cuda, cpu=cpu, check=lambda *given: self.check_whole(given[0], *given[last:]),
        )  # fmt: skip

    def __call__(
        self, x: Any, options: tuple[Any, ...], out_dtype: Any, out: Any, out_scale: Any
    ) -> Any:
        """One call: out, or (out, out_scale) where that is e4m3."""
        is_quick = out is out_scale is out_dtype is None and _is_quick(x)
        is_plain = is_quick or self.operands.are_plain((x,), (out, out_scale))
        is_given = out is not None or out_scale is not None
        try:
            if is_quick:
                return self.cuda_plain(x, options)
            is_e4m3 = self._asks_for_e4m3(x, out_dtype, out, out_scale)
            pair = self.registered_e4m3 if is_e4m3 else self.registered
            if not is_plain and not is_given:
                return pair.returning(x, *options)
            if out is None:
                out = self.new_out(x, E4M3 if is_e4m3 else None)
            if is_e4m3 and out_scale is None:
                out_scale = self.new_scale(x)
            if is_plain:
                into = cuda_into if x.is_cuda else cpu_into
                into(self, x, options, out, out_scale, is_given)
            else:
                pair.writing(x, *options, *((out, out_scale) if is_e4m3 else (out,)))
        except common.FOREIGN:
            self.operands.check_tensors((x,), (out, out_scale))
            self.check(x, out, out_scale)
            raise
        found = (out, out_scale) if is_e4m3 else (out,)
        if is_given and is_plain:
            common.written(found)
        return found if is_e4m3 else out

    def cuda_plain(self, x: torch.Tensor, options: tuple[Any, ...]) -> torch.Tensor:
        """A CUDA tensor into a new one of its dtype: the quick way through eager calls."""
        key = (
            x.dtype, x.shape, x.is_contiguous() or x.stride(), x.data_ptr() & 15, x.get_device(),
            options,
        )  # fmt: skip
        plan = self.plain_plans.get(key)
        if plan is not None:
            found: torch.Tensor = plan(x)
            return found
        self.check(x)
        new = self.new_out(x)
        launch = self.plan(x, options, new, None, key[3])
        params = (GIVEN, *launch.numbers, *self.numbers(*options))
        return call_first(self.plain_plans, key, launch, new, params, x)

    def _asks_for_e4m3(self, x: Any, out_dtype: Any, out: Any, out_scale: Any) -> bool:
        dtype = x.dtype
        if out_dtype is not None:
            common.check_dtype(self.op, "out_dtype", out_dtype, (dtype, E4M3))
            dtype = out_dtype
        if out is not None:
            common.check_tensor(self.op, "out", out)
            if out_dtype is not None and out.dtype != out_dtype:
                raise common.refuse(
                    self.op, "out", f"dtype {str(out_dtype)[6:]}, as out_dtype", out
                )
            dtype = out.dtype
        if out_scale is not None and dtype != E4M3:
            raise TensorError(f"{self.op}: out_scale is given, but out is not e4m3")
        return bool(dtype == E4M3)

    def check(self, x: Any, out: Any = None, out_scale: Any = None) -> None:
        """Everything about the tensors but their addresses."""
        op = self.op
        common.check_data(op, "x", x)
        if x.shape[-1] % self.parts:
            raise common.refuse(op, "x", "an even last dimension (gate, then up)", x)
        if x.shape[-1] > common.MAX_SIZE:
            raise common.refuse(op, "x", f"a last dimension of at most {common.MAX_SIZE}", x)
        shape = (*x.shape[:-1], x.shape[-1] // self.parts)
        common.check_written(op, "out", out, shape, x, (x.dtype, E4M3))
        common.check_written(op, "out_scale", out_scale, shape[:-1], x, (torch.float32,))

    def check_whole(self, x: Any, out: Any, out_scale: Any) -> None:
        """As `check`, of all that a launch has."""
        self.check(x, out, out_scale)
        if (out.dtype == E4M3) != (out_scale is not None):
            wanted = E4M3 if out_scale is not None else x.dtype
            raise common.refuse(self.op, "out", f"dtype {str(wanted)[6:]}", out)

    def new_out(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Uninitialised."""
        shape = x.shape
        return _empty(
            (*shape[:-1], shape[-1] // self.parts), dtype=dtype or x.dtype, device=x.device
        )

    @staticmethod
    def new_scale(x: torch.Tensor) -> torch.Tensor:
        """Uninitialised, one for each row of x."""
        return _empty(x.shape[:-1], dtype=torch.float32, device=x.device)

    def plan(
        self, x: torch.Tensor, options: tuple[Any, ...], out: torch.Tensor,
        out_scale: torch.Tensor | None, low_bits: int,
    ) -> Launch:  # fmt: skip
        """Check the tensors and choose the kernel, its launch shape and its integer parameters."""
        self.check_whole(x, out, out_scale)
        if out.numel() == 0:
            return Launch()
        name = f"{self.op}_{common.DTYPE_TOKENS[x.dtype]}"
        size, elems = out.shape[-1], common.VEC_BYTES // x.element_size()
        places = [out.stride()[:-1], x.stride()[:-1]]
        if out_scale is not None:
            places.insert(1, out_scale.stride())
        outer, rows, pairs = common.split_rows(self.op, x.shape[:-1], places)
        strides = [stride for outer_stride, stride in pairs for stride in (stride, outer_stride)]
        wide = (*strides[:2], *strides[-2:])  # a scale is written alone
        is_scalar = bool(low_bits) or not common.is_aligned(elems, size, *wide)
        numbers = (*strides, rows, size)
        if out_scale is not None:
            variant, threads, rows_a_block = (
                scalar_choice(size)
                if is_scalar
                else choose_of_rows(
                    size // elems, rows * outer, self.parts, self.has_wide and elems == 8
                )
            )
            function = common.shipped(self.op, f"{name}_e4m3_{variant}")
            grid = (-(-rows // rows_a_block), outer, 1)
            block = (threads, rows_a_block, 1)
            how = device_of(x.device).following
            return Launch(function, grid, block, numbers=numbers, options=how)
        gpu = device_of(x.device)
        is_whole, numel = x.is_contiguous() and out.is_contiguous(), out.numel()
        if self.parts == 1 and is_whole and numel <= common.MAX_SIZE:
            # Where rows end makes no difference.
            rows, outer, size = 1, 1, numel
            is_scalar = bool(low_bits) or numel % elems != 0
            numbers = (*strides, rows, size)
        if self.parts == 1 and rows * outer == 1 and not is_scalar:
            variant, threads = "vec", threads_of_whole(numel // elems, gpu.num_sms)
            span = threads * elems
        else:
            # By the element a thread has as many, a warp's lanes apart, or of few one.
            at_once = _THREADS_AN_SM * gpu.num_sms
            is_few = is_scalar and (size <= _SHORT or rows * outer * size <= at_once)
            each = 1 if is_few else elems
            threads = threads_of_vecs(-(-size // each), rows * outer, self.parts)
            variant, span = "scalar" if is_scalar else "vec", threads * each
        # Contiguous rows take fewer parameters and no stride arithmetic.
        if variant == "vec" and is_whole and rows <= common.MAX_GRID_Y:
            variant, numbers = "flat", (size,)
        function = common.shipped(self.op, f"{name}_{variant}")
        grid = (-(-size // span), min(rows, common.MAX_GRID_Y), outer)
        return Launch(function, grid, (threads, 1, 1), numbers=numbers, options=gpu.following)


def cuda_into(
    gated: Gated, x: torch.Tensor, options: tuple[Any, ...], out: torch.Tensor,
    out_scale: torch.Tensor | None, is_given: bool = True,
) -> None:  # fmt: skip
    """The product of a CUDA tensor. is_given: the caller gave what is written."""
    addresses: tuple[int, ...] = (out.data_ptr(), x.data_ptr())
    low_bits = (addresses[0] | addresses[1]) & 15
    key: tuple[Any, ...] = (
        x.dtype, x.shape, x.stride(), out.shape, out.stride(), out.dtype, options, low_bits
    )  # fmt: skip
    if out_scale is not None:
        addresses = (addresses[0], out_scale.data_ptr(), addresses[1])
        key += (out_scale.dtype, out_scale.shape, out_scale.stride())
    found = gated.plans.get(key)
    if found is None:
        launch = tuple(gated.plan(x, options, out, out_scale, low_bits))
        found = gated.plans.keep(key, (launch, gated.writes.spans(out, out_scale, x)))
    (function, grid, block, shared_bytes, numbers, _, how), spans = found
    if is_given and addresses not in spans.apart:
        spans.check(addresses)
    numbers += gated.numbers(*options)
    if out_scale is None:
        params = (out, x, *numbers)
    else:
        params = (out, out_scale, x, *numbers)
    try:
        function(grid, block, shared_bytes, None, params, **how)
    except KernelHubError:
        gated.check(x, out, out_scale)  # the launch checks devices and dtypes; this names
        raise


def cpu_into(
    gated: Gated, x: torch.Tensor, options: tuple[Any, ...], out: torch.Tensor,
    out_scale: torch.Tensor | None, is_given: bool = True,
) -> None:  # fmt: skip
    """The same on the CPU, by torch."""
    gated.check_whole(x, out, out_scale)
    if is_given:
        gated.writes.check(out, out_scale, x)
    found = gated.formula(x.float(), *options)
    if out_scale is None:
        out.copy_(found)
    elif x.numel():
        quantised_rows(found, out, out_scale)
