"""Drafts of a speculating model verified (csrc/sampling/verify_draft.cu): check, plan, launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.counters import counters
from ..core.launch import Launch, Plans
from . import verify_cpu

_OP = "verify_draft"
_NUM_THREADS = 512


class DraftGiven(NamedTuple):
    """The arguments of the registered op."""

    draft_ids: Any
    target_logits: Any
    draft_probs: Any
    temperature: Any
    seed: Any
    offset: Any
    out_ids: Any
    num_accepted: Any


_plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
_NAMES = " ".join(DraftGiven._fields)
_operands = common.Operands(
    _OP, "draft_ids target_logits", "draft_probs temperature seed offset out_ids num_accepted"
)
_writes = common.Writes(_OP, _NAMES, "out_ids num_accepted")


def verify_draft(
    draft_ids: torch.Tensor, target_logits: torch.Tensor, draft_probs: torch.Tensor | None = None,
    *, temperature: torch.Tensor | None = None, seed: torch.Tensor | None = None,
    offset: torch.Tensor | None = None, out_ids: torch.Tensor | None = None,
    num_accepted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """How many of each row's drafted tokens the target keeps, and its own token after them.

        p[j] = softmax(target_logits[j] / temperature),  q = draft_probs
        draft_ids[j] is kept where those before it are and u[j] * q[j, id] < p[j, id]
        then one token from max(p[j] - q[j], 0) of the first that is not, or from p behind the last

    so that what comes out is distributed as if the target alone had drawn it. Without draft_probs
    each draft is certain of itself (a greedy model, a lookup in the prompt): x is drawn from p[j]
    as `ops.sample(target_logits[:, j], temperature=..., seed=seed, offset=offset + j)` draws it,
    and a draft that is x is kept: the same tokens as without speculation. Where temperature is not
    above 0, x is the largest, the first of equal ones.

    draft_ids: (batch, num_drafts) int64, the last dimension contiguous; -1 from where a row has
        none on. One that is no token of the vocabulary ends its row's drafts too.
    target_logits: (batch, num_drafts + 1, vocab_size), fp16, bf16 or fp32, on the GPU or the CPU,
        rows evenly spaced: of the position of each draft, then of the one behind. -inf and nan are
        never drawn: where top_k and the like cut, put -inf. +inf shares all of the mass; where
        nothing is left, token 0.
    draft_probs: (batch, num_drafts, vocab_size) fp32, rows evenly spaced, each with the sum 1: what
        the drafts were drawn by.
    temperature: (batch,) fp32; None: 1.
    seed, offset: (batch,) int64. Without seeds they come from torch's generator of the device;
        without offsets they are 0. Position j draws by (seed, offset + j).
    out_ids: (batch, num_drafts + 1) int64, contiguous: the drafts that are kept, the token after
        them, -1; must not overlap anything, as num_accepted.
    num_accepted: (batch,) int32.

    Returns (out_ids, num_accepted). A CUDA tensor runs the shipped cubin on torch's current stream,
    once, without a wait of the host; a CPU tensor runs a reference in torch, with the same result.
    With KERNEL_HUB_DEBUG=1 each call waits, and refuses a draft that is neither a token nor -1. No
    backward. Raises TensorError naming the argument that does not fit.
    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023;
    Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
    """
    given = DraftGiven(
        draft_ids, target_logits, draft_probs, temperature, seed, offset, out_ids, num_accepted
    )
    is_plain = _operands.are_plain(given[:2], given[2:])
    written = [x for x in (out_ids, num_accepted) if x is not None]
    try:
        if not is_plain:
            _check(given)
        new = _new(given)
        if not is_plain:
            _op(*new)
        else:
            (_cuda_into if target_logits.is_cuda else _cpu_into)(new, bool(written))
    except common.FOREIGN:
        _operands.check_tensors(given[:2], given[2:])
        _check(given)
        raise
    if written and is_plain:
        common.written(tuple(written))
    return new.out_ids, new.num_accepted


def _new(given: DraftGiven) -> DraftGiven:
    """With what the op makes itself: outputs, and seeds."""
    shape, device = given.draft_ids.shape, given.target_logits.device
    new: dict[str, Any] = {}
    if given.out_ids is None:
        new["out_ids"] = torch.empty((shape[0], shape[1] + 1), dtype=torch.int64, device=device)
    if given.num_accepted is None:
        new["num_accepted"] = torch.empty(shape[:1], dtype=torch.int32, device=device)
    if given.seed is None:
        new["seed"] = torch.randint(-(2**63), 2**63 - 1, shape[:1], device=device)
    return given._replace(**new)


def _check(given: DraftGiven) -> None:
    """Everything about the arguments but the addresses of tensors."""
    logits, drafts = given.target_logits, given.draft_ids
    common.check_data(_OP, "target_logits", logits)
    if logits.dim() != 3 or 0 in logits.shape[1:]:
        expected = "shape (batch, num_drafts + 1, vocab_size), at least one token"
        raise common.refuse(_OP, "target_logits", expected, logits)
    batch_size, positions, vocab_size = logits.shape
    if max(vocab_size, batch_size * positions) > common.MAX_SIZE:
        raise common.refuse(_OP, "target_logits", f"sizes of at most {common.MAX_SIZE}", logits)
    whole = (torch.int64,)
    of_drafts = (batch_size, positions - 1)
    common.check_like(_OP, "draft_ids", drafts, of_drafts, logits, dtypes=whole)
    if given.draft_probs is not None:
        shape = (*of_drafts, vocab_size)
        common.check_like(
            _OP, "draft_probs", given.draft_probs, shape, logits, dtypes=(torch.float32,)
        )
    for argument, dtype in (
        ("temperature", torch.float32), ("seed", torch.int64), ("offset", torch.int64)
    ):  # fmt: skip
        value = getattr(given, argument)
        if value is not None:
            common.check_like(_OP, argument, value, (batch_size,), logits, dtypes=(dtype,))
    common.check_written(_OP, "out_ids", given.out_ids, (batch_size, positions), logits, whole)
    if given.out_ids is not None and not given.out_ids.is_contiguous():
        raise common.refuse(_OP, "out_ids", "a contiguous tensor", given.out_ids)
    common.check_written(
        _OP, "num_accepted", given.num_accepted, (batch_size,), logits, (torch.int32,)
    )


def _plan(given: DraftGiven, low_bits: int) -> Launch:
    """Check the arguments; the launch shape and the numbers."""
    _check(given)
    logits, drafts = given.target_logits, given.draft_ids
    batch_size, positions, vocab_size = logits.shape
    if batch_size == 0:
        return Launch()
    logits_stride = common.row_stride(_OP, "target_logits", logits)
    elems = common.VEC_BYTES // logits.element_size()
    numbers = (
        drafts.stride(0) if batch_size > 1 else 0, logits_stride,
        common.row_stride(_OP, "draft_probs", given.draft_probs), positions - 1, vocab_size,
        common.ELEMENT_TYPES.index(logits.dtype),
        int(not low_bits and common.is_aligned(elems, vocab_size, logits_stride)),
    )  # fmt: skip
    grid = (batch_size * positions, 1, 1)
    return Launch(common.shipped(_OP, _OP), grid, (_NUM_THREADS, 1, 1), numbers=numbers)


def _cuda_into(given: DraftGiven, is_given: bool = True) -> None:
    """One launch. is_given: the caller gave out_ids or num_accepted."""
    logits = given.target_logits
    addresses = tuple([x.data_ptr() for x in given if x is not None])
    key = (
        addresses[1] & 15,
        *[None if x is None else (x.dtype, x.shape, x.stride(), x.device) for x in given],
    )
    found = _plans.get(key)
    if found is None:
        plan = tuple(_plan(given, addresses[1] & 15))
        found = _plans.keep(key, (plan, _writes.spans(*given)))
    (function, grid, block, shared_bytes, numbers, _, _), spans = found
    if is_given and addresses not in spans.apart:
        spans.check(addresses)
    if function is None:
        return
    try:
        state = counters(logits.device, logits.shape[0])
        tokens = torch.empty(grid[0], dtype=torch.int64, device=logits.device)
        function(
            grid, block, shared_bytes, None,
            (state, tokens, given.out_ids, given.num_accepted, bounds.flag(_OP, logits), *given[:6],
             *numbers),
        )  # fmt: skip
    except KernelHubError:
        _check(given)  # the launch checks devices and dtypes; this names them
        raise
    if common.is_debugging():
        bounds.report(logits)


def _cpu_into(given: DraftGiven, is_given: bool = True) -> None:
    """The same on the CPU, by torch."""
    _check(given)
    for argument in ("target_logits", "draft_probs"):
        common.row_stride(_OP, argument, getattr(given, argument))
    if is_given:
        _writes.check(*given)
    verify_cpu.verify_into(given)


_op = common.define_given(
    "verify_draft(Tensor draft_ids, Tensor target_logits, Tensor? draft_probs, "
    "Tensor? temperature, Tensor? seed, Tensor? offset, Tensor(a!) out_ids, "
    "Tensor(b!) num_accepted) -> ()",
    lambda *arguments: DraftGiven(*arguments),
    cuda=lambda given: _cuda_into(given), cpu=lambda given: _cpu_into(given), check=_check,
)  # fmt: skip
