"""What a case is made of: random operands, launches of ours and of peers, what they must write."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernel_hub.measure.timing import L2_FACTOR, l2_bytes
from kernel_hub.ops.core import common
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.testing.compare import compare, product_atol

from .outcome import OURS
from .shapes import TALL, WIDE

Launch = Callable[[], Any]
E4M3 = torch.float8_e4m3fn
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": E4M3}
_CHECKED_ROWS = 24
_CHUNK = 1 << 26  # elements of b that a reference converts at a time
_MAX_SETS, _MAX_BYTES = 64, 4 << 30
# Peers may round in between; they stay in unless they compute something else.
_PEER_ERROR = 8
_MORE_ROWS, _MORE_COLUMNS = 300, 128  # of the buffers that operands are slices of


@dataclass(frozen=True)
class Expected:
    """Of what is looked at: the truth in fp64, the same in the operands' dtype, and slack.

    slack: error that is allowed besides, of the largest truth; None is what sums of k products in
        fp32 may have.
    """

    truth: torch.Tensor
    own: torch.Tensor
    slack: float | None = None
    k: int = 0


@dataclass(frozen=True)
class Written:
    """What a launch of the first input set writes.

    tensors: poisoned before it. sample: what is held against the reference, after it.
    reset: makes ready what is read and written. is_whole: every element is written.
    has_same_bits: in every run.
    """

    tensors: Sequence[torch.Tensor]
    sample: Callable[[], Sequence[torch.Tensor]]
    reset: Launch = lambda: None
    is_whole: bool = True
    has_same_bits: bool = True


@dataclass(frozen=True)
class Contender:
    """Launches, one an input set; what the first writes; what that must be."""

    launches: Sequence[Launch]
    written: Written
    expected: Sequence[Expected]

    def wrong(self, name: str) -> str:
        """'' or what is wrong with the first launch."""
        for tensor in self.written.tensors:
            tensor.fill_(float("nan"))
        self.written.reset()
        self.launches[0]()
        if self.written.is_whole:
            for tensor in self.written.tensors:
                if bool(tensor.isnan().any()):
                    return f"{name}: places that were not written, or nan"
        for found, expected in zip(self.written.sample(), self.expected, strict=True):
            atol = product_atol(expected.truth, found.dtype, expected.k)
            if expected.slack is not None:
                atol = expected.slack * float(expected.truth.abs().max())
            result = compare(found, expected.truth, expected.own, atol=atol, name=name)
            # A peer stays in unless it computes something else.
            factor = 1 if name == OURS else _PEER_ERROR
            if not (result.ok or result.error <= factor * result.limit):
                return result.message
        return ""


@dataclass(frozen=True)
class Peer:
    """needs: the names that must be asked for; make: raises where it does not take the case."""

    needs: tuple[str, ...]
    make: Callable[[], Contender]


@dataclass(frozen=True)
class Made:
    """A case on the device.

    is_rotated: the sets together pass the L2. is_eager: wall time of calls from Python, no graph.
    """

    ours: Contender
    peers: Mapping[str, Peer]
    is_rotated: bool = True
    is_eager: bool = False


class Source:
    """Random operands on a device, each in a storage of its own."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self.l2_bytes = l2_bytes() if device == "cuda" else 0

    def num_sets(self, bytes_a_set: int) -> int:
        """Input sets to rotate over: past the L2, where that takes no more than 64 of them."""
        wanted = -(-L2_FACTOR * self.l2_bytes // bytes_a_set)
        return max(1, min(_MAX_SETS, wanted, _MAX_BYTES // bytes_a_set))

    def is_rotated(self, num_sets: int, bytes_a_set: int) -> bool:
        """Whether so many sets pass the L2."""
        return num_sets * bytes_a_set >= L2_FACTOR * self.l2_bytes

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        """Normal, times scale."""
        of = torch.bfloat16 if dtype == E4M3 else dtype
        made = torch.randn(shape, device=self.device, dtype=of)
        return (made if scale == 1.0 else made.mul_(scale)).to(dtype)

    def rows(self, *shape: int, dtype: torch.dtype, options: Sequence[str] = ()) -> torch.Tensor:
        """The same; with the options, columns of a wider buffer or the first rows of a taller."""
        *batch, m, k = shape
        if WIDE in options:
            return self.normal(*batch, m, k + _MORE_COLUMNS, dtype=dtype)[..., :k]
        if TALL in options:
            return self.normal(*batch, m + _MORE_ROWS, k, dtype=dtype)[..., :m, :]
        return self.normal(*shape, dtype=dtype)

    def weight(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Normal, so that products of normal rows are about normal too."""
        return self.normal(*shape, dtype=dtype, scale=shape[-1] ** -0.5)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """To be written."""
        return torch.empty(shape, device=self.device, dtype=dtype)

    def scales(self, *shape: int) -> torch.Tensor:
        """Of 0.5 .. 1.5."""
        return torch.rand(shape, device=self.device) + 0.5

    def some(self, count: int, seed: int = 0) -> torch.Tensor:
        """The first, the last, and some between of `count` rows, ascending."""
        picked = {0, count - 1}
        picked.update(random.Random(seed).choices(range(count), k=_CHECKED_ROWS))
        return torch.tensor(sorted(picked), device=self.device)


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b.T in `dtype`; b is converted in parts."""
    parts = b.split(max(1, _CHUNK // b.shape[-1]))
    return torch.cat([a.to(dtype) @ part.to(dtype).T for part in parts], dim=1)


@contextlib.contextmanager
def planned() -> Iterator[list[str]]:
    """The names of the kernels that ops plan within; every plan is made anew."""
    names: list[str] = []
    shipped = common.shipped

    def noting(cubin: str, function: str) -> Any:
        names.append(function)
        return shipped(cubin, function)

    forget_all()
    common.shipped = noting
    try:
        yield names
    finally:
        common.shipped = shipped
