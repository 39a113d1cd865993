"""`kernel-hub bench OP`: an op beside its peers on sizes of the caller's, checked, then timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..errors import KernelHubError
from ..testing.compare import compare, product_atol
from .beside_op import Inputs, Op, Run, Tensors
from .beside_ops import OPS
from .demo import DTYPES
from .results import ResultRow, summarise
from .timing import num_sets

OURS = "kernel_hub"
WRONG = "WRONG: "
# name -> samples in microseconds, of contenders with a launch for each set of inputs.
Measure = Callable[
    [Mapping[str, Sequence[Callable[[], object]]], int], Mapping[str, Sequence[float]]
]


def sizes_of(op: str, text: str) -> dict[str, int]:
    """The sizes of `op`, those of `text` ('tokens=64,hidden=8192') instead of the defaults.

    Raises KernelHubError for an op or a size that there is not.
    """
    if op not in OPS:
        raise KernelHubError(f"no op {op!r}; there are {', '.join(sorted(OPS))}")
    sizes = dict(OPS[op].sizes)
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = part.partition("=")
        if name not in sizes or not value.isdecimal() or int(value) < 1:
            known = ",".join(f"{name}={size}" for name, size in sizes.items())
            raise KernelHubError(f"--shape {part}: {op} has {known}, whole numbers from 1 on")
        sizes[name] = int(value)
    return sizes


def peers_of(op: str, names: str | None) -> list[str]:
    """The peers named in 'torch,cudnn', or all that `op` has. Raises KernelHubError for another."""
    known = ["torch", "compile", *OPS[op].peers]
    if names is None:
        return known
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in asked if name not in known]:
        raise KernelHubError(
            f"--against {', '.join(unknown)}: {op} can be held against {', '.join(known)}"
        )
    return asked


def _run_of(op: Op, peer: str) -> Run:
    if peer == "torch":
        return op.torch
    if peer == "compile":
        return torch.compile(op.torch, dynamic=False)
    return op.peers[peer]()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _outputs(run: Run, inputs: Inputs) -> list[torch.Tensor]:
    """What `run` makes of a copy of the inputs, some of which it may write; ids as numbers."""
    copied = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    return [x if x.is_floating_point() else x.double() for x in _tensors(run(copied))]


def _wide(inputs: Inputs) -> Inputs:
    """Floating-point inputs in fp32: the truth is computed of them, by torch."""
    return {
        name: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def measure(
    name: str,
    sizes: Mapping[str, int],
    dtype: str,
    peers: Sequence[str],
    timed: Measure,
    tell: Callable[[str], None],
    device: str = "cuda",
) -> list[ResultRow]:
    """Rows of kernel_hub and of each peer that runs; `tell` hears of each, and why one does not.

    What differs from torch in fp32 by more than twice what torch does in `dtype` has a note that
    begins with WRONG. timed: of the contenders' launches and the bytes of one; GraphTimer.measure.
    """
    op = OPS[name]
    make = partial(op.make, sizes, Tensors(device, DTYPES[dtype]))
    inputs = make()
    truths, owns = _outputs(op.torch, _wide(inputs)), _outputs(op.torch, inputs)
    num_bytes = sum(x.nbytes for x in (*inputs.values(), *owns) if isinstance(x, torch.Tensor))
    contenders: dict[str, Run] = {}
    notes: dict[str, str] = {}
    for contender in (OURS, *peers):
        try:
            run = op.ours if contender == OURS else _run_of(op, contender)
            found = _outputs(run, inputs)
        except KernelHubError:
            raise
        except Exception as error:  # whatever a peer refuses with
            if contender == OURS:
                raise
            said = str(error).strip() or "no reason given"
            tell(f"without {contender}: {type(error).__name__}: {said.splitlines()[0]:.200}")
            continue
        tell(contender)
        contenders[contender] = run
        for out, truth, own in zip(found, truths, owns, strict=True):
            atol = product_atol(truth, out.dtype, sizes["k"]) if "k" in sizes else None
            verdict = compare(out, truth, own, atol=atol, name=contender)
            if not verdict.ok:
                notes[contender] = WRONG + verdict.message
    del truths, owns, found
    gc.collect()
    count = num_sets(num_bytes) if device == "cuda" else 2
    sets = [inputs, *(make() for _ in range(count - 1))]
    launches = {who: [partial(run, each) for each in sets] for who, run in contenders.items()}
    shape = " ".join(f"{size}={value}" for size, value in sizes.items())
    rows = summarise(name, f"{shape} {dtype}", timed(launches, num_bytes), "us", ratio_to=OURS)
    flops = op.flops(sizes)
    return [
        replace(row, note=notes.get(row.contender) or _rate(row, flops, num_bytes)) for row in rows
    ]


def _rate(row: ResultRow, flops: int, num_bytes: int) -> str:
    if flops >= 100 * num_bytes:
        return f"{flops / row.median / 1e6:.0f} TFLOP/s"
    return f"{num_bytes / row.median / 1e6:.2f} TB/s"
