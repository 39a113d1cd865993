"""Token ids drawn from logits (csrc/sampling/sample.cu): check -> plan -> launch."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelHubError
from ..core import common
from ..core.counters import counters
from ..core.device import device_of, launch_facts
from ..core.launch import Launch, Plans
from . import cpu
from .given import BATCH, ROWS, SampleGiven, check_rows, row_strides, stride_of_rows

_OP = "sample"
_SM90 = "sample_sm90"  # a row a cluster
_LEFT_OVER = 24  # multiprocessors that clusters of 4 and 8 do not fill
_GROUPS = 8  # of multiprocessors, in which clusters lie
_LEAST_SHARE = 4096  # elements of a block of a cluster
_FOUR = 4  # elements that it reads together
_HELD_BYTES = 4  # an element's
_MOST_WHOLE = 1 << 23  # elements of a row whose sums it keeps in doubles
_NUM_THREADS = 512
_MAX_PARTS = 8
_LEAST_PART = 4096  # elements
_PART_INTS = 4 + 2 * 512  # Part of csrc/sampling/parts.cuh
MOST_TOP = 32
_OUTS = "out out_logprob out_top_ids out_top_logprobs"
_plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
_operands = common.Operands(_OP, "logits", f"{BATCH} {ROWS} {_OUTS}")
_writes = common.Writes(_OP, f"logits {BATCH} {ROWS} {_OUTS}", _OUTS)


def sample(
    logits: torch.Tensor, *, temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None, top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None, seed: torch.Tensor | None = None,
    offset: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    token_bitmask: torch.Tensor | None = None, prompt_bitmask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None, repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None, frequency_penalty: torch.Tensor | None = None,
    softcap: float = 0.0, return_logprob: bool = False, out: torch.Tensor | None = None,
    out_logprob: torch.Tensor | None = None, top_n: torch.Tensor | None = None,
    out_top_ids: torch.Tensor | None = None, out_top_logprobs: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Draw a token of each row of logits; every row by parameters of its own, in one launch.

        z = softcap * tanh(logits / softcap) + bias;  -inf where token_bitmask has no bit
        z = z / r where z > 0 else z * r    of tokens of prompt or output, r the repetition_penalty
        z -= frequency_penalty * output_counts + presence_penalty      of tokens of the output
        p = softmax(z / temperature)

    Of these min_p keeps what has p >= min_p * max(p), of them top_k the k largest, of them top_p
    the fewest largest that have top_p of their mass together; whatever equals the smallest that is
    kept is kept. One of them is drawn in proportion to p, by 64 bits of Philox-4x32-10 of (seed,
    offset): the same token in any batch, row and run, on the GPU and on the CPU.

    logits: (batch, vocab_size), fp16, bf16 or fp32, on the GPU or the CPU; rows of any stride.
    temperature: (batch,) fp32; None: 1. Not above 0, or nan: the largest is taken, the first of
        equal ones.
    top_k: (batch,) int32; below 1, or vocab_size and more: all.
    top_p: (batch,) fp32; 1 and more, or nan: all. 0 and less: the largest and what equals it.
    min_p: (batch,) fp32; not above 0, or nan: all.
    seed, offset: (batch,) int64. Without seeds they come from torch's generator of the device;
        without offsets they are 0.
    bias: (batch, vocab_size) or (vocab_size,) fp32.
    token_bitmask, prompt_bitmask: (batch, ceil(vocab_size / 32)) int32; token t is bit t % 32 of
        word t // 32 (as xgrammar has them): which may be drawn, which the prompt has.
    output_counts: (batch, vocab_size) int32, how often the output has a token.
    repetition_penalty, presence_penalty, frequency_penalty: (batch,) fp32; None: 1, 0, 0. Those
        need output_counts (the first one of output_counts and prompt_bitmask).
    softcap: 0: none.
    return_logprob: also return the log of the probability with which the token was drawn, of what
        is kept, in fp32; 0 where the largest was taken.
    out, out_logprob: where to write, (batch,) int64 and fp32; must not overlap anything.
    out_top_ids, out_top_logprobs: (batch, n) int64 and fp32, n at most 32, contiguous, either
        or both: where to write the n most probable of what is kept, the first of equal ones first,
        and the logs of the probabilities with which they were to be drawn, those that out_logprob
        is of. From where fewer are kept on: -1 and -inf; where the largest was taken, it alone.
    top_n: (batch,) int32: of each row only so many; None: n.

    nan is never drawn, nor is -inf; what is +inf shares all of the mass. Where that leaves nothing,
    the largest is taken as if token_bitmask were not given; where there is none, token 0.
    Returns ids, int64, or (ids, logprobs). A CUDA tensor runs the shipped cubin on torch's current
    stream, once, without a wait of the host; a CPU tensor runs a reference in torch. No backward.
    Raises TensorError naming the argument that does not fit.
    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020; Keskar et al.,
    "CTRL", 2019; Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024; Salmon et al.,
    "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """
    common.check_flag(_OP, "return_logprob", return_logprob)
    options = (
        temperature, top_k, top_p, min_p, seed, offset, repetition_penalty, presence_penalty,
        frequency_penalty, top_n, bias, token_bitmask, prompt_bitmask, output_counts,
    )  # fmt: skip
    outs = out, out_logprob, out_top_ids, out_top_logprobs
    is_plain = _operands.are_plain((logits,), (*options, *outs))
    given = SampleGiven(logits, *options, softcap, *outs)
    written = [x for x in outs if x is not None]
    try:
        if not is_plain:
            _check(given)
        elif type(softcap) is not float:
            given = given._replace(softcap=common.check_number(_OP, "softcap", softcap, least=0.0))
        new = _new(given, bool(return_logprob) or out_logprob is not None)
        if not is_plain:
            _op(*new)
        else:
            (_cuda_into if logits.is_cuda else _cpu_into)(new, bool(written))
    except common.FOREIGN:
        _operands.check_tensors((logits,), (*options, *outs))
        _check(given)
        raise
    if written and is_plain:
        common.written(tuple(written))
    return (new.out, new.out_logprob) if return_logprob else new.out


def _new(given: SampleGiven, has_logprob: bool) -> SampleGiven:
    """With what the op makes itself: outputs, and seeds."""
    logits, batch_size = given.logits, given.logits.shape[:1]
    new: dict[str, Any] = {}
    if given.out is None:
        new["out"] = torch.empty(batch_size, dtype=torch.int64, device=logits.device)
    if given.out_logprob is None and has_logprob:
        new["out_logprob"] = torch.empty(batch_size, dtype=torch.float32, device=logits.device)
    if given.seed is None:
        seeds = torch.randint(-(2**63), 2**63 - 1, batch_size, device=logits.device)
        new["seed"] = seeds
    for made, other, dtype in (
        ("out_top_ids", given.out_top_logprobs, torch.int64),
        ("out_top_logprobs", given.out_top_ids, torch.float32),
    ):
        if getattr(given, made) is None and other is not None:
            new[made] = torch.empty_like(other, dtype=dtype)
    return given._replace(**new)


def _check(given: SampleGiven) -> None:
    """Everything about the arguments but the addresses of tensors."""
    check_rows(_OP, given)
    batch_size, logits = given.logits.shape[0], given.logits
    common.check_written(_OP, "out", given.out, (batch_size,), logits, (torch.int64,))
    common.check_written(
        _OP, "out_logprob", given.out_logprob, (batch_size,), logits, (torch.float32,)
    )
    _check_top(given)


def _check_top(given: SampleGiven) -> None:
    """What the most probable are written to."""
    outs = (("out_top_ids", torch.int64), ("out_top_logprobs", torch.float32))
    n = next((common.last_size(x) for x in given[-2:] if x is not None), 0)
    for argument, dtype in outs:
        value = getattr(given, argument)
        shape = (given.logits.shape[0], n)
        common.check_written(_OP, argument, value, shape, given.logits, (dtype,))
        if n > MOST_TOP:
            raise common.refuse(_OP, argument, f"at most {MOST_TOP} of a row", value)
        if value is not None and not value.is_contiguous():
            raise common.refuse(_OP, argument, "a contiguous tensor", value)


def _check_whole(given: SampleGiven) -> None:
    """The registered op makes no tensor."""
    for argument, other in (("out_top_ids", given[-1]), ("out_top_logprobs", given[-2])):
        if getattr(given, argument) is None and other is not None:
            raise common.refuse(_OP, argument, f"a tensor of shape {tuple(other.shape)}", "None")


def choose_parts(batch_size: int, vocab_size: int, num_sms: int) -> int:
    """How many blocks share a row."""
    return max(1, min(_MAX_PARTS, num_sms // batch_size, vocab_size // _LEAST_PART))


def runs_clusters(device: torch.device) -> bool:
    """Whether csrc/sampling/sample_sm90.cu draws, a row a cluster."""
    return device_of(device).has_wgmma


def choose_team(batch_size: int, vocab_size: int, num_sms: int) -> int:
    """How many blocks of a cluster share a row: a power of two, a block a multiprocessor."""
    for team in (16, 8, 4, 2):
        # Larger clusters do not fill all of the multiprocessors.
        places = num_sms - (0 if team == 2 else _LEFT_OVER)
        if team == 16:
            # As many as find a place, however multiprocessors are dealt to groups of at most 18.
            places = (num_sms - _GROUPS * (team - 1)) // (18 - team + 1) * team
        if team * batch_size <= places and team * _LEAST_SHARE <= vocab_size:
            return team
    return 1


def _plan(given: SampleGiven, low_bits: tuple[int, int]) -> Launch:
    """Check the arguments; the launch shape and the numbers.

    low_bits: of the addresses of logits, and of those of bias and output_counts.
    """
    _check(given)
    logits = given.logits
    batch_size, vocab_size = logits.shape
    if batch_size == 0:
        return Launch()
    row_stride = logits.stride(0) if batch_size > 1 else 0
    num_sms = device_of(logits.device).num_sms
    is_sm90 = runs_clusters(logits.device)
    aligned = _aligned(given, low_bits, row_stride) if is_sm90 else _is_plain(given, low_bits[0])
    numbers = (
        *row_strides(given), vocab_size, common.ELEMENT_TYPES.index(logits.dtype), int(aligned),
        0 if given.out_top_ids is None else given.out_top_ids.shape[1], float(given.softcap),
    )  # fmt: skip
    if is_sm90:
        facts = launch_facts(_SM90, _OP)
        team = choose_team(batch_size, vocab_size, num_sms)
        # Rows that are held: what each element weighs.
        held = _HELD_BYTES * facts.sizes["block_n"]
        is_held = vocab_size <= team * facts.sizes["block_n"]
        return Launch(
            common.shipped(_SM90, _OP), (batch_size * team, 1, 1), facts.block,
            facts.shared_bytes + (held if is_held else 0), numbers,
            options={"cluster": (team, 1, 1), **device_of(logits.device).following},
        )  # fmt: skip
    parts = choose_parts(batch_size, vocab_size, num_sms)
    function = common.shipped(_OP, _OP)
    return Launch(function, (batch_size, parts, 1), (_NUM_THREADS, 1, 1), numbers=numbers)


def _is_plain(given: SampleGiven, low_bits: int) -> bool:
    """Whether nothing changes the values of rows, and these are of whole, aligned vectors."""
    logits = given.logits
    is_changed = given.softcap != 0 or any(
        getattr(given, each) is not None for each in ROWS.split()
    )
    elems = common.VEC_BYTES // logits.element_size()
    stride = logits.stride(0) if logits.shape[0] > 1 else 0
    return not low_bits and not is_changed and common.is_aligned(elems, logits.shape[1], stride)


def _aligned(given: SampleGiven, low_bits: tuple[int, int], row_stride: int) -> int:
    """kAlignedLogits and kAlignedChanges of csrc/sampling/sm90/fours.cuh."""
    size, four_bytes = given.logits.shape[1], _FOUR * given.logits.element_size()
    logits = (
        common.is_aligned(_FOUR, size, row_stride)
        and low_bits[0] % four_bytes == 0
        and size <= _MOST_WHOLE
    )
    changing = stride_of_rows(given.bias), stride_of_rows(given.output_counts)
    changes = common.is_aligned(_FOUR, size, *changing) and not low_bits[1]
    return int(logits) + 2 * int(changes)


def _shared(device: torch.device, batch_size: int, parts: int) -> tuple[Any, Any]:
    """By which blocks that share rows find out about each other."""
    if parts == 1:
        return None, None
    made = torch.empty(batch_size * parts * _PART_INTS, dtype=torch.int32, device=device)
    return counters(device, batch_size), made


def _cuda_into(given: SampleGiven, is_given: bool = True) -> None:
    """One launch. is_given: the caller gave out or out_logprob."""
    (logits, temperature, top_k, top_p, min_p, seed, offset, repetition, presence, frequency, top_n,
     bias, token_bitmask, prompt_bitmask, output_counts, softcap, *outs) = given  # fmt: skip
    tensors = given.tensors
    addresses = tuple([x.data_ptr() for x in tensors if x is not None])
    low_bits = (
        addresses[0] & 15,
        (0 if bias is None else bias.data_ptr() & 15)
        | (0 if output_counts is None else output_counts.data_ptr() & 15),
    )  # fmt: skip
    key = (
        softcap, low_bits,
        *[None if x is None else (x.dtype, x.shape, x.stride(), x.device) for x in tensors],
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        plan = tuple(_plan(given, low_bits))
        found = _plans.keep(key, (plan, _writes.spans(*tensors)))
    (function, grid, block, shared_bytes, numbers, _, options), spans = found
    if is_given and addresses not in spans.apart:
        spans.check(addresses)
    shared: tuple[Any, ...] = ()
    if not options:
        shared = _shared(logits.device, grid[0], grid[1])
    try:
        function(
            grid, block, shared_bytes, None,
            (*shared, *outs, logits, temperature, top_k, top_n, top_p, min_p, seed,
             offset, bias, token_bitmask, repetition, presence, frequency, prompt_bitmask,
             output_counts, *numbers), **options,
        )  # fmt: skip
    except KernelHubError:
        _check(given)  # the launch checks devices and dtypes; this names them
        raise


def _cpu_into(given: SampleGiven, is_given: bool = True) -> None:
    """The same on the CPU, by torch."""
    _check(given)
    if is_given:
        _writes.check(*given.tensors)
    if given.logits.shape[0]:
        cpu.sample_into(given)


_op = common.define_given(
    "sample(Tensor logits, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, "
    "Tensor? seed, Tensor? offset, Tensor? repetition_penalty, Tensor? presence_penalty, "
    "Tensor? frequency_penalty, Tensor? top_n, Tensor? bias, Tensor? token_bitmask, "
    "Tensor? prompt_bitmask, Tensor? output_counts, float softcap, Tensor(a!) out, "
    "Tensor(b!)? out_logprob, Tensor(c!)? out_top_ids, Tensor(d!)? out_top_logprobs) -> ()",
    lambda *arguments: SampleGiven(*arguments),
    cuda=lambda given: _cuda_into(given), cpu=lambda given: _cpu_into(given), check=_check,
    whole=_check_whole,
)  # fmt: skip
