"""What a rank says of its slice of the vocabulary (csrc/sampling/sample_slice.cu), for
`ops.vocab_slices` to draw from: check -> plan -> launch."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelHubError
from ..core import common
from ..core.device import device_of
from ..core.launch import Launch, Plans
from . import slices
from .given import ROWS, SampleGiven, check_rows, row_strides

_OP = "sample_slice"
_BATCH = "temperature seed offset repetition_penalty presence_penalty frequency_penalty"
_TENSORS = (*_BATCH.split(), *ROWS.split())
_NUM_THREADS = 512

_plans: Plans[tuple[Launch, common.Spans]] = Plans()
_operands = common.Operands(_OP, "logits", f"{_BATCH} {ROWS} out")
_writes = common.Writes(_OP, f"logits {_BATCH} {ROWS} out", "out")


def sample_slice(
    logits: torch.Tensor, first_token: int, *, temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None, offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, token_bitmask: torch.Tensor | None = None,
    prompt_bitmask: torch.Tensor | None = None, output_counts: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None, presence_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None, softcap: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """What a rank says of its slice of the vocabulary: the first half of `sample` where each of
    several ranks has some of a row's logits.

        summary = ops.sample_slice(own_logits, rank * own_logits.shape[1], ...)
        summaries = torch.empty(world_size, *summary.shape, ...)
        torch.distributed.all_gather_into_tensor(summaries, summary)
        ids, status = ops.vocab_slices.sample_slices(summaries, ...)

    z is as `sample` has it. Listed are the values above the 257th largest of the slice, all of
    them where there are not so many, with their tokens; of the rest its largest, its mass at the
    row's temperature, and one token drawn from it. 2,088 bytes a row.

    logits: (batch, slice_size), fp16, bf16 or fp32, on the GPU or the CPU: tokens first_token ..
        first_token + slice_size - 1 of every row. Slices may differ in size.
    temperature, seed, offset: (batch,), as `sample` takes them, the same on every rank; without
        seeds, 0.
    bias, token_bitmask, prompt_bitmask, output_counts, the penalties, softcap: as `sample` takes
        them, of the slice alone; token first_token is bit 0 of the first word.
    out: where to write, (batch, 522) int32, rows of any stride; must not overlap anything.

    Returns (batch, 522) int32, the same bits in any run. A CUDA tensor runs the shipped cubin on
    torch's current stream, without a wait of the host; a CPU tensor runs a reference in torch. No
    backward. Raises TensorError naming the argument that does not fit.
    """
    given = SampleGiven(
        logits, temperature, None, None, None, seed, offset, repetition_penalty, presence_penalty,
        frequency_penalty, None, bias, token_bitmask, prompt_bitmask, output_counts, softcap, out,
        None, None, None,
    )  # fmt: skip
    options = [getattr(given, name) for name in _TENSORS]
    is_plain = _operands.are_plain((logits,), (*options, out))
    try:
        if not is_plain or type(softcap) is not float or type(first_token) is not int:
            _check(given, first_token)
            first_token = common.check_whole(_OP, "first_token", first_token)
            given = given._replace(softcap=common.check_number(_OP, "softcap", softcap, least=0.0))
        new = given
        if out is None:
            shape = (logits.shape[0], slices.SUMMARY_INTS)
            new = given._replace(out=torch.empty(shape, dtype=torch.int32, device=logits.device))
        if not is_plain:
            _op(logits, first_token, *options, given.softcap, new.out)
        else:
            (_cuda_into if logits.is_cuda else _cpu_into)(new, first_token)
    except common.FOREIGN:
        _operands.check_tensors((logits,), (*options, out))
        _check(given, first_token)
        raise
    if out is not None and is_plain:
        common.written((out,))
    return new.out


def _check(given: SampleGiven, first_token: int) -> None:
    """Everything about the arguments but the addresses of tensors."""
    check_rows(_OP, given)
    batch_size, size = given.logits.shape
    if common.check_whole(_OP, "first_token", first_token) + size > common.MAX_SIZE:
        raise common.refuse(_OP, "first_token", f"tokens up to {common.MAX_SIZE}", first_token)
    shape = (batch_size, slices.SUMMARY_INTS)
    common.check_written(_OP, "out", given.out, shape, given.logits, (torch.int32,))


def _plan(given: SampleGiven, first_token: int) -> Launch:
    """Check the arguments; the launch shape and the numbers."""
    _check(given, first_token)
    batch_size, size = given.logits.shape
    if batch_size == 0:
        return Launch()
    numbers = (
        given.out.stride(0), *row_strides(given), first_token, size,
        common.ELEMENT_TYPES.index(given.logits.dtype), float(given.softcap),
    )  # fmt: skip
    options = device_of(given.logits.device).following
    function = common.shipped(_OP, _OP)
    return Launch(
        function, (batch_size, 1, 1), (_NUM_THREADS, 1, 1), numbers=numbers, options=options
    )


def _cuda_into(given: SampleGiven, first_token: int) -> None:
    """One launch."""
    tensors = given.logits, *[getattr(given, name) for name in _TENSORS], given.out
    key = (
        first_token, given.softcap,
        *[None if x is None else (x.dtype, x.shape, x.stride(), x.device) for x in tensors],
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        found = _plans.keep(key, (_plan(given, first_token), _writes.spans(*tensors)))
    launch, spans = found
    addresses = tuple([x.data_ptr() for x in tensors if x is not None])
    if addresses not in spans.apart:
        spans.check(addresses)
    try:
        launch.function(
            launch.grid, launch.block, 0, None,
            (given.out, given.logits, given.temperature, given.seed, given.offset, given.bias,
             given.token_bitmask, given.repetition_penalty, given.presence_penalty,
             given.frequency_penalty, given.prompt_bitmask, given.output_counts, *launch.numbers),
            **launch.options,
        )  # fmt: skip
    except KernelHubError:
        _check(given, first_token)  # the launch checks devices and dtypes; this names them
        raise


def _cpu_into(given: SampleGiven, first_token: int) -> None:
    """The same on the CPU, by torch."""
    _check(given, first_token)
    _writes.check(given.logits, *[getattr(given, name) for name in _TENSORS], given.out)
    if given.logits.shape[0]:
        slices.sum_up(given, first_token)


def _given(logits: Any, first_token: int, *arguments: Any) -> tuple[SampleGiven, int]:
    *tensors, softcap, out = arguments
    named = dict(zip(_TENSORS, tensors, strict=True))
    return SampleGiven(logits, **named, softcap=softcap, out=out), first_token


_op = common.define_given(
    "sample_slice(Tensor logits, int first_token, Tensor? temperature, Tensor? seed, "
    "Tensor? offset, Tensor? repetition_penalty, Tensor? presence_penalty, "
    "Tensor? frequency_penalty, Tensor? bias, Tensor? token_bitmask, Tensor? prompt_bitmask, "
    "Tensor? output_counts, float softcap, Tensor(a!) out) -> ()",
    _given, cuda=lambda given: _cuda_into(*given), cpu=lambda given: _cpu_into(*given),
    check=lambda given: _check(*given),
)  # fmt: skip
