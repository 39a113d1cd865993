"""Runs one case: every contender checked, timed, checked again."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from kernel_hub import KernelHubError

from . import (
    attention,
    attention_backward,
    attention_shapes,
    fp8,
    many,
    paired,
    products,
    rowwise,
    sdpa,
    sdpa_shapes,
    shapes,
)  # fmt: skip
from .clock import Times
from .contenders import Contender, Launch, Made, Peer, Source, Written, planned
from .outcome import OURS, Outcome

Lot = shapes.Lot | attention_shapes.AttentionLot | sdpa_shapes.SdpaLot
AnyLot = Lot | rowwise.RowLot
# family -> how its cases are made
_PRODUCTS: dict[str, Callable[[shapes.Lot, Source], Made]] = {
    "linear": products.make,
    "linear_fp8_fast": fp8.make,
    "linear_fp8": fp8.make,
    "linear_fp8_blocks": fp8.make,
    "qkv_linear": paired.make_qkv,
    "swiglu_linear": paired.make_swiglu,
    "epilogues": products.make,
    "grouped_linear": many.make_grouped,
    "batched_matmul": many.make_batched,
}
_ATTENTION: dict[str, Callable[[attention_shapes.AttentionLot, Source], Made]] = {
    **dict.fromkeys(attention_shapes.FAMILIES, attention.make),
    "backward": attention_backward.make,
    "backward_eager": attention_backward.make_eager,
    attention_shapes.ORDERED: attention_backward.make_ordered,
}
_SDPA = dict.fromkeys(sdpa_shapes.FAMILIES, sdpa.make)
FAMILIES: dict[str, Callable[[Any, Source], Made]] = {**_PRODUCTS, **_ATTENTION, **_SDPA}
GROUPS = {
    "products": tuple(_PRODUCTS), "attention": tuple(_ATTENTION), "rows": rowwise.FAMILIES,
    "torch": tuple(_SDPA),
}  # fmt: skip


def draw(family: str, seed: int, number: int) -> AnyLot:
    """The case `number` of a family under a seed, whatever else is drawn."""
    if family in rowwise.FAMILIES:
        return rowwise.draw(family, seed, number)
    if family in _SDPA:
        return sdpa_shapes.draw(family, seed, number)
    drawn = attention_shapes.draw if family in _ATTENTION else shapes.draw
    found: Lot = drawn(family, seed, number)
    return found


class Timer(Protocol):
    """As `clock.Clock`."""

    def measure(
        self, contenders: Mapping[str, Sequence[Launch]], expected_us: float, *,
        is_rotated: bool = True, is_matrix_bound: bool = False, is_eager: bool = False,
    ) -> Times:  # fmt: skip
        """contenders: name -> launches, one an input set."""


def run(lot: Lot, source: Source, timer: Timer, peers: Sequence[str]) -> Outcome:
    """What became of a case beside `peers`; wrong outputs of ours are said, and not timed."""
    torch.manual_seed(zlib.crc32(f"{lot.family} {lot.name}".encode()))
    found = Outcome(lot.family, lot.name)
    try:
        with planned() as names:
            made = FAMILIES[lot.family](lot, source)
            wrong = made.ours.wrong(OURS)
        found = dataclasses.replace(found, variant=", ".join(dict.fromkeys(names)))
        if wrong:
            return dataclasses.replace(found, wrong=wrong)
        bits = [tensor.clone() for tensor in made.ours.written.tensors]
        ran, refused, reasons = _peers(made.peers, peers)
        contenders = {OURS: made.ours, **ran}
        times = timer.measure(
            {name: x.launches for name, x in contenders.items()}, lot.expected_us,
            is_rotated=made.is_rotated, is_matrix_bound=lot.is_matrix_bound,
            is_eager=made.is_eager,
        )  # fmt: skip
    except KernelHubError as error:
        return dataclasses.replace(found, wrong=f"{type(error).__name__}: {error}")
    for name, contender in contenders.items():
        wrong = times.failed.get(name) or contender.wrong(name)
        if name == OURS and not wrong and not _same(bits, contender.written):
            wrong = "other bits than before it was timed"
        if wrong and name == OURS:
            return dataclasses.replace(found, wrong=f"after timing: {wrong}")
        if wrong:
            reasons[name], refused[name] = f"after timing: {wrong}", made.peers[name].needs
            times.train.pop(name, None)
            times.behind.pop(name, None)
    kept = {name: peer.needs for name, peer in made.peers.items() if name in times.train}
    return dataclasses.replace(
        found, train=times.train, behind=times.behind, peers=kept, refused=refused, reasons=reasons
    )


def _peers(
    peers: Mapping[str, Peer], wanted: Sequence[str]
) -> tuple[dict[str, Contender], dict[str, tuple[str, ...]], dict[str, str]]:
    """Those that run and are right; the others' names, and why not."""
    ran: dict[str, Contender] = {}
    refused: dict[str, tuple[str, ...]] = {}
    reasons: dict[str, str] = {}
    for name, peer in peers.items():
        if not set(peer.needs) <= set(wanted):
            continue
        try:
            contender = peer.make()
            wrong = contender.wrong(name)
        except Exception as error:  # noqa: BLE001  a peer that fails is left out, and said
            wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if wrong:
            refused[name], reasons[name] = peer.needs, wrong
        else:
            ran[name] = contender
    return ran, refused, reasons


def _same(before: Sequence[torch.Tensor], written: Written) -> bool:
    """Bit by bit, where they are promised; what no launch wrote is nan in both."""
    return not written.has_same_bits or all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in zip(before, written.tensors, strict=True)
    )
