"""Tensors with nothing around them, for kernels whose tables lie about where to read and write.

On the CPU each has pages of its own in an address range of which nothing else is there: the
emulator ends a launch that touches the rest of it. On a GPU they lie far apart in one buffer whose
every byte is 0xff (nan, in every float dtype); what was written between them is found afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

# Far more than the largest page number of a table reaches from the middle.
_RANGE_BYTES = 1 << 45
_PAGE = mmap.PAGESIZE
_GAP_BYTES = 1 << 20  # between two tensors
_GPU_BYTES = 96 << 20
_ALIGNMENT = 16
_NONE, _READ_WRITE = 0, 3
_PRIVATE, _FIXED, _ANONYMOUS, _NO_RESERVE = 0x02, 0x10, 0x20, 0x4000

_DONT_NEED = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_open: list[Arena] = []


def whereabouts(address: int) -> str:
    """What lies at an address, in words."""
    for arena in _open:
        if arena.begin <= address < arena.end:
            return arena.whereabouts(address)
    return f"address {address:#x}"


def _map(address: int, size: int, access: int, flags: int) -> int:
    flags |= _PRIVATE | _ANONYMOUS | _NO_RESERVE
    found = _libc.mmap(address or None, size, access, flags, -1, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"mmap of {size} bytes failed")
    return int(found)


class _Range:
    """Addresses of which nothing is there but the tensors of the process's arenas."""

    def __init__(self) -> None:
        self.begin = _map(0, _RANGE_BYTES, _NONE, 0)
        self.next = self.begin + _RANGE_BYTES // 2

    def pages(self, span: int) -> int:
        """The address of `span` new bytes that may be read and written."""
        begin = _map(self.next + _GAP_BYTES, span, _READ_WRITE, _FIXED)
        self.next = begin + span + _GAP_BYTES
        return begin


_range = functools.cache(_Range)


class Arena:
    """Tensors on a device, each at the end or the beginning of its memory, as the lot says."""

    def __init__(self, device: str, generator: random.Random) -> None:
        self.device = device
        self._generator = generator
        self._places: list[tuple[str, int, int]] = []  # name, first byte, past the last one
        if device == "cpu":
            self.begin, self._size = _range().begin, _RANGE_BYTES
        else:
            self._size = _GPU_BYTES
            self._bytes = torch.full((self._size,), 0xFF, dtype=torch.uint8, device=device)
            self.begin = self._bytes.data_ptr()
            self._next = self.begin + self._size // 4
        self.end = self.begin + self._size
        self._pages: list[tuple[int, torch.Tensor]] = []

    def __enter__(self) -> Arena:
        _open.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _open.remove(self)
        # Tensors that somebody still holds (pytest, of a test that failed) stay readable: as zeros.
        for begin, page in self._pages:
            _libc.madvise(begin, page.numel(), _DONT_NEED)

    def _bytes_of(self, name: str, size: int) -> torch.Tensor:
        """`size` bytes, aligned, with a gap before and behind."""
        room = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        if self.device != "cpu":
            at = self._next + _GAP_BYTES // 4
            self._next = at + room + _GAP_BYTES // 4
            if self._next > self.end - self._size // 4:
                raise MemoryError(f"an arena of {self._size} bytes is too small")
            # No view: writes to one tensor are none to another, for autograd.
            found = torch.empty(0, dtype=torch.uint8, device=self.device)
            found.set_(self._bytes.untyped_storage(), at - self.begin, (size,), (1,))
        else:
            span = -(-room // _PAGE) * _PAGE
            begin = _range().pages(span)
            held = (ctypes.c_uint8 * span).from_address(begin)
            page = torch.frombuffer(held, dtype=torch.uint8)
            page.fill_(0xFF)
            self._pages.append((begin, page))
            offset = span - room if self._generator.random() < 0.7 else 0
            at, found = begin + offset, page[offset : offset + size]
        self._places.append((name, at, at + size))
        return found

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor whose every byte is 0xff."""
        size = dtype.itemsize
        for each in shape:
            size *= each
        return self._bytes_of(name, size).view(dtype).view(*shape)

    def put(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of `values`."""
        room = self.empty(name, values.shape, values.dtype)
        if values.numel():
            room.view(torch.uint8).copy_(values.contiguous().view(torch.uint8))
        return room

    def put_all(self, **tensors: Any) -> dict[str, Any]:
        """The same of each that is a tensor; the others as they are."""
        return {
            name: self.put(name, value) if isinstance(value, torch.Tensor) else value
            for name, value in tensors.items()
        }

    def whereabouts(self, address: int) -> str:
        """The nearest tensor to an address, and how far from it."""

        def distance(place: tuple[str, int, int]) -> int:
            return max(place[1] - address, address - place[2] + 1, 0)

        name, first, past = min(self._places, key=distance)
        if address < first:
            return f"{first - address} bytes before {name}"
        return f"{address - past} bytes past the end of {name}"

    def check(self) -> None:
        """Raise AssertionError where something beside the tensors was written."""
        blocks = self._pages if self.device == "cpu" else [(self.begin, self._bytes)]
        for begin, block in blocks:
            changed = block != 0xFF
            for _, first, past in self._places:
                low, high = max(first - begin, 0), min(past - begin, block.numel())
                if low < high:
                    changed[low:high] = False
            if bool(changed.any()):
                at = int(changed.nonzero()[0])
                where = self.whereabouts(begin + at)
                raise AssertionError(f"{int(changed.sum())} bytes were written outside: {where}")


SEED = int(os.environ.get("KERNEL_HUB_SEED", "20261122"))
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


def outside(generator: random.Random, limit: int, *, least: int = -1) -> int:
    """An int32 that is not from 0 to limit - 1: next to it, near it, far away. At most `least`
    where it is below 0."""
    near = (limit, limit + 1, 2 * limit + 3, 10**6 + limit, INT_MAX, INT_MAX - 15)
    below = (least, least - 1, -limit - 1, -(10**6), INT_MIN, INT_MIN + 1)
    return generator.choice((*near, *(min(each, least) for each in below)))


@contextlib.contextmanager
def drawn(device: str, name: str, lot: int) -> Iterator[tuple[random.Random, Arena]]:
    """What a test draws a hostile case from, and where its tensors lie."""
    print(f"KERNEL_HUB_SEED={SEED}, {name}, lot {lot}")
    generator = random.Random(f"{SEED} {name} {lot}")
    with Arena(device, generator) as arena:
        yield generator, arena
