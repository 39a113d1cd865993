"""What both ops that verify drafts do: check, plan, launch. A chain is a tree without parents."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.counters import counters
from ..core.device import PlannedGpu, device_of, launch_facts
from ..core.launch import Launch, Plans
from . import verify_cpu

_FOUR = 4  # neighbours that a thread takes
# Elements of a block: two fours a thread; what is worth a turn of its own, and without
# probabilities of drafts, where passes are fewer.
_LEAST_SHARE, _SHARE_OF_A_TURN, _SHARE_OF_CERTAIN = 2048, 12288, 24576
_BLOCKS_A_SM = 3
_LEFT_OVER = 12  # places of a GPU that clusters of 8 do not fill
_INT64, _INT32, _FP32 = (torch.int64,), (torch.int32,), (torch.float32,)


class VerifyGiven(NamedTuple):
    """The arguments of a call; parents and path are None of a chain."""

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


_NONE = VerifyGiven(*[None] * len(VerifyGiven._fields))
_OPTIONAL, _WRITTEN = VerifyGiven._fields[3:], VerifyGiven._fields[7:]


def choose_team(
    positions: int, vocab_size: int, gpu: PlannedGpu, has_probs: bool = True,
    may_be_greedy: bool = False, most: int = 16,
) -> int:  # fmt: skip
    """How many blocks of a cluster share a position: a power of two, at most `most`.

    As many as are resident at once; of long rows more, in turns, whose logits stay in the L2 from
    one pass to the next. Greedy rows have one pass: a block that begins late has nothing to gain.
    """
    if not gpu.has_clusters:
        return 1
    is_read_once = may_be_greedy and not has_probs
    places = _BLOCKS_A_SM * gpu.num_sms - _LEFT_OVER
    if is_read_once:
        places //= 2
    of_a_turn = _SHARE_OF_A_TURN if has_probs else _SHARE_OF_CERTAIN
    for team in (size for size in (16, 8, 4, 2) if size <= most):
        # Of sixteen: with few passes, where each has a multiprocessor; never in turns.
        room = gpu.num_sms if team == 16 and not has_probs else places
        is_resident = team * positions <= room
        takes_turns = not is_read_once and team <= 8
        if (is_resident or takes_turns) and team * (
            _LEAST_SHARE if is_resident else of_a_turn
        ) <= vocab_size:
            return team
    return 1


class Verification:
    """One of the ops. op: its name, of its cubin and kernel too; most_drafts: None of chains."""

    def __init__(self, op: str, schema: str, most_drafts: int | None = None) -> None:
        self.op, self.most_drafts = op, most_drafts
        self.is_tree = most_drafts is not None
        self.required = VerifyGiven._fields[:3] if self.is_tree else ("draft_ids", "target_logits")
        self.names = (*self.required, *(_OPTIONAL if self.is_tree else _OPTIONAL[:-1]))
        self.place = self.names.index("target_logits")
        # A bare tuple of a launch: unpacking it takes 40 ns less.
        self.plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
        self.operands = common.Operands(op, " ".join(self.required), " ".join(_OPTIONAL))
        self.writes = common.Writes(op, " ".join(VerifyGiven._fields), " ".join(_WRITTEN))
        # By their names at each call: a test gives one another's.
        self.registered = common.define_given(
            schema,
            lambda *arguments: _NONE._replace(**dict(zip(self.names, arguments, strict=True))),
            cuda=lambda given: cuda_into(self, given), cpu=lambda given: cpu_into(self, given),
            check=self.check,
        )  # fmt: skip

    def __call__(self, given: VerifyGiven, *required: Any) -> VerifyGiven:
        """One call: its arguments, with what the op made itself. required: those it must have."""
        is_plain = self.operands.are_plain(required, given[3:])
        written = [x for x in given[7:] if x is not None]
        try:
            if not is_plain:
                self.check(given)
            new = self.new(given)
            if not is_plain:
                self.registered(*[getattr(new, name) for name in self.names])
            else:
                into = cuda_into if new.target_logits.is_cuda else cpu_into
                into(self, new, bool(written))
        except common.FOREIGN:
            self.operands.check_tensors(required, given[3:])
            self.check(given)
            raise
        if written and is_plain:
            common.written(tuple(written))
        return new

    def new(self, given: VerifyGiven) -> VerifyGiven:
        """With what the op makes itself: outputs, and seeds."""
        (batch, drafts), device = given.draft_ids.shape, given.target_logits.device
        new: dict[str, Any] = {}
        if given.out_ids is None:
            new["out_ids"] = torch.empty((batch, drafts + 1), dtype=torch.int64, device=device)
        if given.num_accepted is None:
            new["num_accepted"] = torch.empty((batch,), dtype=torch.int32, device=device)
        if given.path is None and self.is_tree:
            new["path"] = torch.empty((batch, drafts), dtype=torch.int32, device=device)
        if given.seed is None:
            new["seed"] = torch.randint(-(2**63), 2**63 - 1, (batch,), device=device)
        return given._replace(**new) if new else given

    def check(self, given: VerifyGiven) -> None:
        """Everything about the arguments but the addresses of tensors."""
        op, logits = self.op, given.target_logits
        common.check_data(op, "target_logits", logits)
        most = self.most_drafts
        is_long = most is not None and logits.dim() == 3 and logits.shape[1] > most + 1
        if logits.dim() != 3 or 0 in logits.shape[1:] or is_long:
            limit = "" if most is None else f"at most {most} drafts, "
            expected = f"shape (batch, num_drafts + 1, vocab_size), {limit}at least one token"
            raise common.refuse(op, "target_logits", expected, logits)
        batch, positions, vocab_size = logits.shape
        if max(vocab_size, batch * positions) > common.MAX_SIZE:
            raise common.refuse(op, "target_logits", f"sizes of at most {common.MAX_SIZE}", logits)
        ids = given.draft_ids
        common.check_tensor(op, "draft_ids", ids)
        if ids.dim() == 2 and ids.shape[0] == batch and ids.shape[1] != positions - 1:
            expected = f"shape {(batch, positions - 1)}, one less than target_logits has positions"
            raise common.refuse(op, "draft_ids", expected, ids)
        of_drafts = (batch, positions - 1)
        for argument, shape, dtypes in (
            ("draft_ids", of_drafts, _INT64), ("parents", of_drafts, _INT32),
            ("draft_probs", (*of_drafts, vocab_size), _FP32), ("temperature", (batch,), _FP32),
            ("seed", (batch,), _INT64), ("offset", (batch,), _INT64),
        ):  # fmt: skip
            value = getattr(given, argument)
            if value is not None or argument in self.required:
                common.check_like(op, argument, value, shape, logits, dtypes=dtypes)
        for argument, size, kinds in (
            ("out_ids", (batch, positions), _INT64), ("num_accepted", (batch,), _INT32),
            ("path", of_drafts, _INT32),
        ):  # fmt: skip
            value = getattr(given, argument)
            common.check_written(op, argument, value, size, logits, kinds)
            if value is not None and not value.is_contiguous():
                raise common.refuse(op, argument, "a contiguous tensor", value)

    def plan(self, given: VerifyGiven, low_bits: int) -> Launch:
        """Check the arguments; the launch shape and the numbers.

        low_bits: of addresses of fours that do not begin where such may.
        """
        self.check(given)
        logits = given.target_logits
        batch, positions, vocab_size = logits.shape
        if batch == 0:
            return Launch()
        logits_stride, probs_stride = (
            common.row_stride(self.op, name, getattr(given, name))
            for name in ("target_logits", "draft_probs")
        )
        numbers = (
            *[x.stride(0) if batch > 1 else 0 for x in given[:2] if x is not None], logits_stride,
            probs_stride, positions - 1, vocab_size, common.ELEMENT_TYPES.index(logits.dtype),
        )  # fmt: skip
        is_plain = not low_bits and common.is_aligned(
            _FOUR, vocab_size, logits_stride, probs_stride
        )
        function = self.op if is_plain else f"{self.op}_scalar"
        gpu, facts = device_of(logits.device), launch_facts(self.op, function)
        has_probs = given.draft_probs is not None
        may_be_greedy = given.temperature is not None
        most = 8 if self.is_tree else 16  # trees as they were measured
        team = choose_team(batch * positions, vocab_size, gpu, has_probs, may_be_greedy, most)
        grid = (batch * positions * team, 1, 1)
        options = gpu.following
        if team > 1:
            options["cluster"] = (team, 1, 1)
        return Launch(
            common.shipped(self.op, function), grid, facts.block, facts.shared_bytes, numbers,
            options=options,
        )  # fmt: skip


def cuda_into(op: Verification, given: VerifyGiven, is_given: bool = True) -> None:
    """One launch. is_given: the caller gave some of what is written."""
    logits = given.target_logits
    addresses = tuple([x.data_ptr() for x in given if x is not None])
    low_bits = addresses[op.place] & (_FOUR * logits.element_size() - 1)
    if given.draft_probs is not None:
        low_bits |= given.draft_probs.data_ptr() & 15
    key = (
        low_bits,
        *[None if x is None else (x.dtype, x.shape, x.stride(), x.device) for x in given],
    )
    found = op.plans.get(key)
    if found is None:
        plan = tuple(op.plan(given, low_bits))
        found = op.plans.keep(key, (plan, op.writes.spans(*given)))
    (function, grid, block, shared_bytes, numbers, _, options), spans = found
    if is_given and addresses not in spans.apart:
        spans.check(addresses)
    try:
        state = counters(logits.device, logits.shape[0])
        tokens = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
        flag = bounds.flag(op.op, logits)
        tensors: tuple[Any, ...]
        if op.is_tree:
            tensors = (*given[7:], flag, *given[:7])
        else:
            tensors = (*given[7:9], flag, given[0], *given[2:7])
        function(grid, block, shared_bytes, None, (state, tokens, *tensors, *numbers), **options)
    except KernelHubError:
        op.check(given)  # the launch checks devices and dtypes; this names them
        raise
    if common.is_debugging():
        bounds.report(logits)


def cpu_into(op: Verification, given: VerifyGiven, is_given: bool = True) -> None:
    """The same on the CPU, by torch."""
    op.check(given)
    for argument in ("target_logits", "draft_probs"):
        common.row_stride(op.op, argument, getattr(given, argument))
    if is_given:
        op.writes.check(*given)
    verify_cpu.verify_into(given)
