"""Trees of drafts verified (csrc/sampling/verify_tree.cu): check, plan, launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.counters import counters
from ..core.launch import Launch, Plans
from . import verify_cpu

_OP = "verify_tree"
_NUM_THREADS, _MOST_DRAFTS = 512, 128


class TreeGiven(NamedTuple):
    """The arguments of the registered op."""

    draft_ids: Any
    parents: Any
    target_logits: Any
    draft_probs: Any
    temperature: Any
    seed: Any
    offset: Any
    out_ids: Any
    num_accepted: Any
    path: Any


_plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
_NAMES = " ".join(TreeGiven._fields)
_operands = common.Operands(
    _OP, "draft_ids parents target_logits",
    "draft_probs temperature seed offset out_ids num_accepted path",
)  # fmt: skip
_writes = common.Writes(_OP, _NAMES, "out_ids num_accepted path")


def verify_tree(
    draft_ids: torch.Tensor, parents: torch.Tensor, target_logits: torch.Tensor,
    draft_probs: torch.Tensor | None = None, *, temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None, offset: torch.Tensor | None = None,
    out_ids: torch.Tensor | None = None, num_accepted: torch.Tensor | None = None,
    path: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Which path of each row's tree of drafts the target keeps, and its own token behind it.

        p = softmax(target_logits[v + 1] / temperature)  behind draft v; v = -1: behind none
        of the drafts c whose parent is v, in order:  c is kept where u[c] * q[c, id] < p[id]
        else p = max(p - q[c], 0) / sum of it, and the next is tried;  q = draft_probs
        then the same behind the one that is kept; where none is, one token from what is left of p

    so that what comes out is distributed as if the target alone had drawn it, where each draft was
    drawn by its q whatever its siblings are. A tree of one child each is `verify_draft`'s chain,
    with the same tokens. Without draft_probs each draft is certain of itself: x is drawn from p as
    `ops.sample(target_logits[:, v + 1], temperature=..., seed=seed, offset=offset + v + 1)` draws
    it, and the first child that is x is kept. Where temperature is not above 0, x is the largest,
    the first of equal ones.

    draft_ids: (batch, num_drafts) int64, the last dimension contiguous, at most 128 drafts; -1
        where there is none. One that is no token of the vocabulary is none either.
    parents: (batch, num_drafts) int32, the last dimension contiguous: the place of the draft that
        each comes behind, below its own, -1 for the root. A draft with another is not in the tree.
    target_logits: (batch, num_drafts + 1, vocab_size), fp16, bf16 or fp32, on the GPU or the CPU,
        rows evenly spaced: behind the root, then behind each draft. -inf, nan, +inf and rows where
        nothing is left as `verify_draft` has them.
    draft_probs: (batch, num_drafts, vocab_size) fp32, rows evenly spaced, each with the sum 1: what
        each draft was drawn by.
    temperature: (batch,) fp32; None: 1.
    seed, offset: (batch,) int64. Without seeds they come from torch's generator of the device;
        without offsets they are 0. Behind draft v is drawn by (seed, offset + v + 1).
    out_ids: (batch, num_drafts + 1) int64, contiguous: the drafts that are kept, the token after
        them, -1; must not overlap anything, as the others.
    num_accepted: (batch,) int32.
    path: (batch, num_drafts) int32, contiguous: the places of the drafts that are kept, -1.

    Returns (out_ids, num_accepted, path). A CUDA tensor runs the shipped cubin on torch's current
    stream, once, without a wait of the host; a CPU tensor runs a reference in torch, with the same
    result. With KERNEL_HUB_DEBUG=1 each call waits, and refuses a draft that is neither a token nor
    -1 and a parent that is not before its child. No backward. Raises TensorError naming the
    argument that does not fit.
    Source: Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based
    Speculative Inference and Verification", 2024.
    """
    given = TreeGiven(
        draft_ids, parents, target_logits, draft_probs, temperature, seed, offset, out_ids,
        num_accepted, path,
    )  # fmt: skip
    is_plain = _operands.are_plain(given[:3], given[3:])
    written = [x for x in given[7:] if x is not None]
    try:
        if not is_plain:
            _check(given)
        new = _new(given)
        if not is_plain:
            _op(*new)
        else:
            (_cuda_into if target_logits.is_cuda else _cpu_into)(new, bool(written))
    except common.FOREIGN:
        _operands.check_tensors(given[:3], given[3:])
        _check(given)
        raise
    if written and is_plain:
        common.written(tuple(written))
    return new.out_ids, new.num_accepted, new.path


def _new(given: TreeGiven) -> TreeGiven:
    """With what the op makes itself: outputs, and seeds."""
    (batch, drafts), device = given.draft_ids.shape, given.target_logits.device
    new: dict[str, Any] = {}
    for name, shape, dtype in (
        ("out_ids", (batch, drafts + 1), torch.int64), ("num_accepted", (batch,), torch.int32),
        ("path", (batch, drafts), torch.int32),
    ):  # fmt: skip
        if getattr(given, name) is None:
            new[name] = torch.empty(shape, dtype=dtype, device=device)
    if given.seed is None:
        new["seed"] = torch.randint(-(2**63), 2**63 - 1, (batch,), device=device)
    return given._replace(**new)


def _check(given: TreeGiven) -> None:
    """Everything about the arguments but the addresses of tensors."""
    logits = given.target_logits
    common.check_data(_OP, "target_logits", logits)
    if logits.dim() != 3 or 0 in logits.shape[1:] or logits.shape[1] > _MOST_DRAFTS + 1:
        expected = (
            f"shape (batch, num_drafts + 1, vocab_size), at most {_MOST_DRAFTS} drafts, at least "
            "one token"
        )
        raise common.refuse(_OP, "target_logits", expected, logits)
    batch, positions, vocab_size = logits.shape
    if max(vocab_size, batch * positions) > common.MAX_SIZE:
        raise common.refuse(_OP, "target_logits", f"sizes of at most {common.MAX_SIZE}", logits)
    whole, places, fp32 = (torch.int64,), (torch.int32,), (torch.float32,)
    of_drafts = (batch, positions - 1)
    common.check_like(_OP, "draft_ids", given.draft_ids, of_drafts, logits, dtypes=whole)
    common.check_like(_OP, "parents", given.parents, of_drafts, logits, dtypes=places)
    for argument, shape, dtypes in (
        ("draft_probs", (*of_drafts, vocab_size), fp32), ("temperature", (batch,), fp32),
        ("seed", (batch,), whole), ("offset", (batch,), whole),
    ):  # fmt: skip
        value = getattr(given, argument)
        if value is not None:
            common.check_like(_OP, argument, value, shape, logits, dtypes=dtypes)
    for argument, size, kinds in (
        ("out_ids", (batch, positions), whole), ("num_accepted", (batch,), places),
        ("path", of_drafts, places),
    ):  # fmt: skip
        value = getattr(given, argument)
        common.check_written(_OP, argument, value, size, logits, kinds)
        if value is not None and not value.is_contiguous():
            raise common.refuse(_OP, argument, "a contiguous tensor", value)


def _plan(given: TreeGiven, low_bits: int) -> Launch:
    """Check the arguments; the launch shape and the numbers."""
    _check(given)
    logits = given.target_logits
    batch, positions, vocab_size = logits.shape
    if batch == 0:
        return Launch()
    logits_stride = common.row_stride(_OP, "target_logits", logits)
    elems = common.VEC_BYTES // logits.element_size()
    numbers = (
        given.draft_ids.stride(0) if batch > 1 else 0, given.parents.stride(0) if batch > 1 else 0,
        logits_stride, common.row_stride(_OP, "draft_probs", given.draft_probs), positions - 1,
        vocab_size,
        common.ELEMENT_TYPES.index(logits.dtype),
        int(not low_bits and common.is_aligned(elems, vocab_size, logits_stride)),
    )  # fmt: skip
    grid = (batch * positions, 1, 1)
    return Launch(common.shipped(_OP, _OP), grid, (_NUM_THREADS, 1, 1), numbers=numbers)


def _cuda_into(given: TreeGiven, is_given: bool = True) -> None:
    """One launch. is_given: the caller gave some of what is written."""
    logits = given.target_logits
    addresses = tuple([x.data_ptr() for x in given if x is not None])
    key = (
        addresses[2] & 15,
        *[None if x is None else (x.dtype, x.shape, x.stride(), x.device) for x in given],
    )
    found = _plans.get(key)
    if found is None:
        plan = tuple(_plan(given, addresses[2] & 15))
        found = _plans.keep(key, (plan, _writes.spans(*given)))
    (function, grid, block, shared_bytes, numbers, _, _), spans = found
    if is_given and addresses not in spans.apart:
        spans.check(addresses)
    if function is None:
        return
    try:
        state = counters(logits.device, logits.shape[0])
        tokens = torch.empty(grid[0], dtype=torch.int64, device=logits.device)
        written = (given.out_ids, given.num_accepted, given.path)
        params = (state, tokens, *written, bounds.flag(_OP, logits), *given[:7], *numbers)
        function(grid, block, shared_bytes, None, params)
    except KernelHubError:
        _check(given)  # the launch checks devices and dtypes; this names them
        raise
    if common.is_debugging():
        bounds.report(logits)


def _cpu_into(given: TreeGiven, is_given: bool = True) -> None:
    """The same on the CPU, by torch."""
    _check(given)
    for argument in ("target_logits", "draft_probs"):
        common.row_stride(_OP, argument, getattr(given, argument))
    if is_given:
        _writes.check(*given)
    verify_cpu.verify_tree_into(given)


_op = common.define_given(
    "verify_tree(Tensor draft_ids, Tensor parents, Tensor target_logits, Tensor? draft_probs, "
    "Tensor? temperature, Tensor? seed, Tensor? offset, Tensor(a!) out_ids, "
    "Tensor(b!) num_accepted, Tensor(c!) path) -> ()",
    lambda *arguments: TreeGiven(*arguments),
    cuda=lambda given: _cuda_into(given), cpu=lambda given: _cpu_into(given), check=_check,
)  # fmt: skip
