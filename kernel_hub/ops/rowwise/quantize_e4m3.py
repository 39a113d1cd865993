"""Values into e4m3 with scales (csrc/rowwise/quantize_e4m3.cu): check -> plan -> launch."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelHubError, TensorError
from ..core import common
from ..core.counters import counters
from ..core.device import device_of
from ..core.launch import Launch, Plans
from .gated import choose_of_rows
from .norm import E4M3
from .norm_shapes import scalar_choice

_OP = "quantize_e4m3"
_BLOCK = 128
# How many rows and columns share a scale; 0: all of them.
_SHARED = {"tensor": (0, 0), "row": (1, 0), "1x128": (1, _BLOCK), "128x128": (_BLOCK, _BLOCK)}
_MOST, _LEAST = 448.0, 1e-12
_NOTHING = _LEAST / _MOST  # the scale of no elements
# Of a contiguous tensor whose largest is looked for: wide enough for four loads a thread.
_FOLDED = (4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8)
_ROWS_AT_ONCE, _TILE_THREADS = 4, 256
# Threads of a multiprocessor; a kernel with four loads in flight has 64 registers.
_AT_ONCE = 1024
# Of a whole tensor that one block holds.
_HELD_VECS, _HELD_ELEMS = 4096, 8192
_plans: Plans[tuple[tuple[Launch, ...], common.Spans]] = Plans()
_operands = common.Operands(_OP, "x", "scale out out_scale")
_writes = common.Writes(_OP, "out out_scale x scale", "out out_scale")


def quantize_e4m3(
    x: torch.Tensor, scale: torch.Tensor | None = None, *, per: str = "row",
    out: torch.Tensor | None = None, out_scale: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Round to e4m3 by scales that are given, or found: of the whole, rows, blocks or tiles.

        out_scale = max(|x|) / 448 of what shares it (at least 1e-12 / 448),  out = round(x / scale)

    computed in fp32; what is beyond +-448 becomes that, nan stays nan. A nan or an infinity shows
    in the scale that is found. x is about out * scale, as ops.linear takes both.

    x: (..., k), fp16, bf16 or fp32, on the GPU or the CPU; last dimension contiguous, the leading
        ones in at most two separately strided groups.
    scale: None, or scales in fp32 of any strides, in the shape that `per` says.
    per: what shares a scale. "tensor": shape (1,), given also (); "row" (a token): x.shape[:-1];
        "1x128": (..., ceil(k / 128)); "128x128", of the last two dimensions: (..., ceil(n / 128),
        ceil(k / 128)).
    out: like x in torch.float8_e4m3fn, strides of its own; must not overlap anything else.
    out_scale: where to write scales that are found, fp32, any strides; must not overlap the others.

    Returns (out, out_scale), or out alone where scale is given. A CUDA tensor runs the shipped
    cubin on torch's current stream, without a wait of the host, and twice for one scale of many or
    strided values (what lies halfway between two codes may take the other one then); a CPU tensor
    runs a reference in torch. No backward. Raises TensorError naming the argument that does not
    fit.
    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; DeepSeek-AI, "DeepSeek-V3
    Technical Report", 2024, 3.3.
    """
    common.check_choice(_OP, "per", per, _SHARED)
    if scale is not None and out_scale is not None:
        raise TensorError(f"{_OP}: out_scale is given, but so is scale")
    is_plain = _operands.are_plain((x,), (scale, out, out_scale))
    is_given = out is not None or out_scale is not None
    try:
        if not is_plain:
            _check(x, scale, per, out, out_scale)
            if scale is not None:
                return _registered_given.run((x, scale, per), out)
            if not is_given:
                return _registered.returning(x, per)
        if out is None:
            out = _new_out(x)
        if scale is None and out_scale is None:
            out_scale = _new_scale(x, per)
        if not is_plain:
            _registered.writing(x, per, out, out_scale)
        elif scale is None:
            (_cuda_into if x.is_cuda else _cpu_into)(x, per, out, out_scale, is_given)
        else:
            (_cuda_given_into if x.is_cuda else _cpu_given_into)(x, scale, per, out, is_given)
    except common.FOREIGN:
        _operands.check_tensors((x,), (scale, out, out_scale))
        _check(x, scale, per, out, out_scale)
        raise
    found = (out,) if scale is not None else (out, out_scale)
    if is_given and is_plain:
        common.written(found)
    return out if scale is not None else found


def _scale_shape(x: Any, per: str) -> tuple[int, ...]:
    shape, (rows, columns) = tuple(x.shape), _SHARED[per]
    if not rows:
        return (1,)
    if not columns:
        return shape[:-1]
    if rows > 1:
        shape = (*shape[:-2], -(-shape[-2] // rows), shape[-1])
    return (*shape[:-1], -(-shape[-1] // columns))


def _check(x: Any, scale: Any, per: str, out: Any = None, out_scale: Any = None) -> None:
    """Everything about the tensors but their addresses."""
    common.check_data(_OP, "x", x)
    if x.shape[-1] > common.MAX_SIZE:
        raise common.refuse(_OP, "x", f"a last dimension of at most {common.MAX_SIZE}", x)
    if per == "128x128" and x.dim() < 2:
        raise common.refuse(_OP, "x", "at least two dimensions, as per='128x128'", x)
    common.check_written(_OP, "out", out, x.shape, x, (E4M3,))
    shape = _scale_shape(x, per)
    for argument, value in (("scale", scale), ("out_scale", out_scale)):
        if value is None:
            continue
        common.check_fp32(_OP, argument, value, x)
        found = tuple(value.shape)  # no `in`: Dynamo compares no tuples of symbols there
        if found != shape and not (per == "tensor" and found == ()):
            raise common.refuse(_OP, argument, f"shape {shape}, as per={per!r}", value)
    if out_scale is not None:
        common.check_output(_OP, "out_scale", out_scale)


def _new_out(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=E4M3, device=x.device)


def _new_scale(x: torch.Tensor, per: str) -> torch.Tensor:
    return torch.empty(_scale_shape(x, per), dtype=torch.float32, device=x.device)


def _places(x: Any, scale: Any, per: str, out: Any) -> tuple[int, int, tuple[int, ...]]:
    """(outer, rows, strides of rows, outer and, of a scale, columns: of out, scale and x)."""
    columns = scale.stride(-1) if _SHARED[per][1] else 0
    if per == "128x128":
        of_rows = [tensor.stride(-2) for tensor in (out, scale, x)]
        (outer,), groups = common.collapse(
            _OP, x.shape[:-2], [tensor.stride()[:-2] for tensor in (out, scale, x)], groups=1
        )
        rows, pairs = x.shape[-2], list(zip([each[0] for each in groups], of_rows, strict=True))
        if outer > common.MAX_GRID_Y:
            raise common.refuse(_OP, "x", f"at most {common.MAX_GRID_Y} matrices", x)
    else:
        none = (0,) * (x.dim() - 1)
        of_scale = none if per == "tensor" else scale.stride()[: x.dim() - 1]
        outer, rows, pairs = common.split_rows(
            _OP, x.shape[:-1], [out.stride()[:-1], of_scale, x.stride()[:-1]]
        )
    (out_outer, out_row), (scale_outer, scale_row), (x_outer, x_row) = pairs
    return outer, rows, (out_row, out_outer, scale_row, scale_outer, columns, x_row, x_outer)


def _plan(
    x: Any, scale: Any, per: str, out: Any, out_scale: Any, low_bits: int
) -> tuple[Launch, ...]:
    """Check the tensors and choose the kernels, their launch shapes and integer parameters."""
    _check(x, scale, per, out, out_scale)
    if x.numel() == 0:
        return ()
    size, elems = x.shape[-1], common.VEC_BYTES // x.element_size()
    outer, rows, strides = _places(x, out_scale if scale is None else scale, per, out)
    if scale is None and per == "tensor" and x.is_contiguous() and out.is_contiguous():
        # Few enough for a block are one row of it: no second launch.
        whole, is_whole = x.numel(), low_bits == 0 and x.numel() % elems == 0
        if whole <= (_HELD_VECS * elems if is_whole else _HELD_ELEMS):
            per, rows, outer, size, strides = "row", 1, 1, whole, (0,) * len(strides)
    is_scalar = bool(low_bits) or not common.is_aligned(elems, size, *strides[:2], *strides[-2:])
    width = "scalar" if is_scalar else "vec"
    # Threads that take an access of each row, or, of blocks, a warp each by the element.
    lanes = size // elems
    if is_scalar:
        lanes = -(-size // _BLOCK) * 32 if scale is None and per == "1x128" else size
    rows_a_thread = _rows_a_thread(rows * outer, lanes, device_of(x.device).num_sms)
    numbers = (*strides, rows, size, rows_a_thread)
    if scale is None and per == "row":
        variant, threads, rows_a_block = (
            scalar_choice(size)
            if is_scalar
            else choose_of_rows(size // elems, rows * outer, 1, elems == 8)
        )
        grid = (-(-rows // rows_a_block), outer, 1)
        return (_launch(x, f"row_{variant}", grid, (threads, rows_a_block, 1), numbers),)
    if scale is None and per == "128x128":
        grid = (-(-size // _BLOCK), -(-rows // _BLOCK), outer)
        return (_launch(x, f"tile_{width}", grid, (_TILE_THREADS, 1, 1), numbers),)
    blocks = -(-lanes // (128 if rows_a_thread == 1 else 256))
    threads = 32 * -(-lanes // (32 * blocks))
    grid = (blocks, min(-(-rows // rows_a_thread), common.MAX_GRID_Y), outer)
    if scale is None and per == "1x128":
        return (_launch(x, f"block_{width}", grid, (threads, 1, 1), numbers),)
    shift = (7 if per == "128x128" else 0,)
    given = _launch(x, f"given_{width}", grid, (threads, 1, 1), numbers + shift)
    if scale is not None:
        return (given,)
    return _plan_largest(x, outer, rows, strides, bool(low_bits)), given


def _rows_a_thread(rows: int, lanes: int, num_sms: int) -> int:
    """One where all threads run at once, else as many as leave that many threads."""
    return max(1, min(_ROWS_AT_ONCE, rows * lanes // (_AT_ONCE * num_sms)))


def _plan_largest(
    x: Any, outer: int, rows: int, strides: tuple[int, ...], is_scalar: bool
) -> Launch:
    """Of the whole tensor."""
    size, elems, (x_row, x_outer) = x.shape[-1], common.VEC_BYTES // x.element_size(), strides[-2:]
    if x.is_contiguous():
        size = next((each for each in _FOLDED if x.numel() % each == 0), size)
        outer, rows, x_row, x_outer = 1, x.numel() // size, size, 0
    is_scalar = is_scalar or not common.is_aligned(elems, size, x_row, x_outer)
    accesses = size if is_scalar else size // elems
    threads = 1 << (accesses - 1).bit_length() if accesses <= 32 else min(
        512, 32 * -(-accesses // 32)
    )  # fmt: skip
    rows_a_block = max(1, 256 // threads)
    blocks = min(-(-rows // (_ROWS_AT_ONCE * rows_a_block)), 4 * device_of(x.device).num_sms)
    variant = "largest_scalar" if is_scalar else "largest_vec"
    numbers = (x_row, x_outer, rows, size)
    return _launch(x, variant, (blocks, outer, 1), (threads, rows_a_block, 1), numbers)


def _launch(x: Any, variant: str, grid: Any, block: Any, numbers: tuple[int, ...]) -> Launch:
    function = common.shipped(_OP, f"{_OP}_{common.DTYPE_TOKENS[x.dtype]}_{variant}")
    options = device_of(x.device).following
    return Launch(function, grid, block, numbers=numbers, options=options)


def _found(x: Any, scale: Any, per: str, out: Any, out_scale: Any, is_given: bool) -> Any:
    """The launches of a call, planned before or now; what is written was held apart."""
    given = [out, x, scale if out_scale is None else out_scale]
    low_bits = (out.data_ptr() | x.data_ptr()) & 15
    key = (per, scale is None, low_bits, *[(t.dtype, t.shape, t.stride(), t.device) for t in given])
    found = _plans.get(key)
    if found is None:
        plan = _plan(x, scale, per, out, out_scale, low_bits)
        found = _plans.keep(key, (plan, _writes.spans(out, out_scale, x, scale)))
    launches, spans = found
    if is_given:
        tensors = (out, out_scale, x, scale)
        addresses = tuple([t.data_ptr() for t in tensors if t is not None])
        if addresses not in spans.apart:
            spans.check(addresses)
    return launches


def _run(launch: Launch, params: tuple[Any, ...], *checked: Any) -> None:
    function, grid, block, shared_bytes, numbers, _, options = launch
    try:
        function(grid, block, shared_bytes, None, (*params, *numbers), **options)
    except KernelHubError:
        _check(*checked)  # the launch checks devices and dtypes; this names them
        raise


def _cuda_into(x: Any, per: str, out: Any, out_scale: Any, is_given: bool = True) -> None:
    """Scales that are found. is_given: the caller gave what is written."""
    checked = (x, None, per, out, out_scale)
    launches = _found(*checked, is_given)
    if len(launches) == 2:
        state = counters(x.device, 2)
        _run(launches[0], (out_scale, state, x), *checked)
        _run(launches[1], (out, x, out_scale), *checked)
    elif launches:
        _run(launches[0], (out, out_scale, x), *checked)
    else:
        out_scale.fill_(_NOTHING)


def _cuda_given_into(x: Any, scale: Any, per: str, out: Any, is_given: bool = True) -> None:
    """Scales that are there."""
    for launch in _found(x, scale, per, out, None, is_given):
        _run(launch, (out, x, scale), x, scale, per, out)


def _spread(scale: torch.Tensor, x: torch.Tensor, per: str) -> torch.Tensor:
    """A scale for each element of x, or what broadcasts to that."""
    rows, columns = _SHARED[per]
    if not rows:
        return scale.reshape(())
    if not columns:
        return scale[..., None]
    if rows > 1:
        scale = scale.repeat_interleave(rows, -2)[..., : x.shape[-2], :]
    return scale.repeat_interleave(columns, -1)[..., : x.shape[-1]]


def _largest(x: torch.Tensor, per: str) -> torch.Tensor:
    """The largest magnitude of what shares a scale."""
    x, (rows, columns) = x.abs(), _SHARED[per]
    if not rows:
        return x.amax()
    if not columns:
        return x.amax(-1)
    k = x.shape[-1]
    x = torch.nn.functional.pad(x, (0, -k % columns)).unflatten(-1, (-1, columns)).amax(-1)
    if rows == 1:
        return x
    n = x.shape[-2]
    return torch.nn.functional.pad(x, (0, 0, 0, -n % rows)).unflatten(-2, (-1, rows)).amax(-2)


def _cpu_into(x: Any, per: str, out: Any, out_scale: Any, is_given: bool = True) -> None:
    """The same on the CPU, by torch."""
    _check(x, None, per, out, out_scale)
    if is_given:
        _writes.check(out, out_scale, x, None)
    if x.numel() == 0:
        out_scale.fill_(_NOTHING)
        return
    scale = _largest(x.float(), per).clamp_min(_LEAST) / _MOST
    out_scale.copy_(scale.reshape(out_scale.shape))
    _cpu_given_into(x, out_scale, per, out, False)


def _cpu_given_into(x: Any, scale: Any, per: str, out: Any, is_given: bool = True) -> None:
    _check(x, scale, per, out)
    if is_given:
        _writes.check(out, None, x, scale)
    if x.numel():
        out.copy_((x.float() / _spread(scale, x, per)).clamp(-_MOST, _MOST))


# By their names at each call: a test gives one another's.
_registered = common.define_pair(
    _OP, "Tensor x, str per", "out out_scale",
    new=lambda x, per: (_new_out(x), _new_scale(x, per)),
    cuda=lambda *given: _cuda_into(*given), cpu=lambda *given: _cpu_into(*given),
    check=lambda x, per, out, out_scale: _check(x, None, per, out, out_scale),
)  # fmt: skip
_registered_given = common.define_pair(
    f"{_OP}_given", "Tensor x, Tensor scale, str per",
    new=lambda x, scale, per: _new_out(x),
    cuda=lambda *given: _cuda_given_into(*given), cpu=lambda *given: _cpu_given_into(*given),
    check=_check,
)  # fmt: skip
