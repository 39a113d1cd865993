"""The GPU that launches are planned for: its one reader, and what its architecture can do."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...collection.manifest import open_collection
from ...collection.resolve import fitting, parse_target
from ...tuning import Gpu
from .launch import forget_all

SM80, SM90 = (8, 0), (9, 0)


def has_wgmma(compute_capability: tuple[int, int]) -> bool:
    """Whether it runs the sm90 bodies: wgmma, the TMA, clusters."""
    return compute_capability == SM90


def overlaps_launches(compute_capability: tuple[int, int]) -> bool:
    """Whether a launch may begin under the end of the one before."""
    return compute_capability >= SM90


class Stated(NamedTuple):
    """What a kernel with a fixed block states of its launches."""

    block: tuple[int, int, int]
    shared_bytes: int
    sizes: Mapping[str, int]


@functools.cache
def launch_facts(cubin: str, function: str, compute_capability: tuple[int, int] = SM90) -> Stated:
    """What a shipped kernel states, as it is built for a GPU.

    For one that has no such kernel, and whose launch says so, what the newest that has it states.
    """
    facts = _facts(cubin, function, compute_capability)
    assert facts is not None and facts.block is not None and facts.shared_bytes is not None, (
        f"{function} of {cubin}.cu stands in no DESCRIBED that says its block and shared memory"
    )
    return Stated(facts.block, facts.shared_bytes, facts.sizes)


@functools.cache
def launch_sizes(cubin: str, function: str) -> Mapping[str, int]:
    """The sizes alone, of a kernel for Hopper whose blocks may be of several sizes too."""
    facts = _facts(cubin, function, SM90)
    assert facts is not None, f"{function} of {cubin}.cu stands in no DESCRIBED"
    return facts.sizes


def _facts(cubin: str, function: str, compute_capability: tuple[int, int]) -> Any:
    every = open_collection().manifest.cubins[cubin].values()
    entry, _ = fitting(compute_capability, every)
    if entry is None or function not in entry.functions:
        entries = [entry for entry in every if function in entry.functions]
        assert entries, f"{cubin} has no {function}"
        entry, _ = fitting(compute_capability, entries)
        entry = entry or max(entries, key=lambda other: parse_target(other.target))
    return entry.functions[function].launch


def capability_of(arch: str) -> tuple[int, int]:
    """(9, 0) for 'sm90'."""
    return parse_target(arch)[:2]


class PlannedGpu(NamedTuple):
    """A GPU as plans know it."""

    compute_capability: tuple[int, int]
    num_sms: int
    name: str = ""  # as the driver says it; '' is no real GPU
    shared_bytes: int = 227 << 10  # a block may have
    sm_shared_bytes: int = 228 << 10  # all blocks of a multiprocessor
    peak_bytes_a_us: float = 4.9e6  # of its memory: an H200's

    @property
    def gpu(self) -> Gpu:
        """As the tables of tuning know it."""
        return Gpu(*self[:3])

    @property
    def has_wgmma(self) -> bool:
        """Whether it runs the sm90 bodies."""
        return has_wgmma(self.compute_capability)

    @property
    def has_clusters(self) -> bool:
        """Whether blocks of a cluster read each other's shared memory."""
        return self.compute_capability >= SM90

    @property
    def overlaps_launches(self) -> bool:
        """Whether a launch may begin under the end of the one before."""
        return overlaps_launches(self.compute_capability)

    @property
    def following(self) -> dict[str, Any]:
        """Options of a launch whose kernel waits for the one before it, first of all."""
        return {"programmatic": True} if self.overlaps_launches else {}


def is_at_hand(like: torch.Tensor) -> bool:
    """Whether something may be begun on the GPU of `like` ahead of a launch: torch has begun with
    it, and no graph is captured."""
    is_begun = like.is_cuda and torch.cuda.is_initialized()
    return is_begun and not torch.cuda.is_current_stream_capturing()


# What CPU tensors are planned for, where tests run kernels in an emulator.
EMULATED = PlannedGpu(SM80, 7)
_H100_BYTES_A_US, _H200_BYTES = 3.35e6, 100 << 30  # the least that an H200 has
_pretended: PlannedGpu | None = None


@functools.cache
def device_of(device: torch.device) -> PlannedGpu:
    """The GPU that a launch on tensors of `device` is planned for."""
    if _pretended is not None:
        return _pretended
    if device.type != "cuda":
        return EMULATED
    found = _properties(device)
    return PlannedGpu(
        (found.major, found.minor),
        found.multi_processor_count,
        found.name,
        getattr(found, "shared_memory_per_block_optin", EMULATED.shared_bytes),
        getattr(found, "shared_memory_per_multiprocessor", EMULATED.sm_shared_bytes),
        _peak_bytes_a_us(found),
    )


def _properties(device: torch.device) -> Any:
    """As `torch.cuda.get_device_properties` has them, which asks NVML how many GPUs there are: 0.8
    ms of a first call."""
    read = getattr(torch.cuda, "_get_device_properties", None)  # once CUDA has begun
    if read is None or device.index is None:
        return torch.cuda.get_device_properties(device)
    return read(device.index)


def _peak_bytes_a_us(found: Any) -> float:
    """Two bits a wire and clock, which is in kHz; where torch does not say, an H200's or, of less
    memory, an H100's."""
    clock, bits = (getattr(found, x, 0) for x in ("memory_clock_rate", "memory_bus_width"))
    is_large = getattr(found, "total_memory", _H200_BYTES) >= _H200_BYTES
    supposed = EMULATED.peak_bytes_a_us if is_large else _H100_BYTES_A_US
    return 2 * clock * bits / 8 / 1e3 or supposed


@contextlib.contextmanager
def pretend(device: PlannedGpu) -> Iterator[None]:
    """Plan for this GPU, wherever the tensors are."""
    global _pretended
    before, _pretended = _pretended, device
    _forget()
    try:
        yield
    finally:
        _pretended = before
        _forget()


def _forget() -> None:
    device_of.cache_clear()
    forget_all()
