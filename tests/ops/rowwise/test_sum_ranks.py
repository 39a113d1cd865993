"""Sums over ranks: what a rank adds, in which order, and what it sends the others."""

from __future__ import annotations

import random

import pytest
import torch
from bits import same_bits
from ways import Way

from kernel_hub.ops.rank_sums import RankSums, clear, inbox_bytes

MOST_BYTES = 1 << 16
NOT_COME = 0x80008000 - 2**32
DTYPES = [torch.float16, torch.bfloat16]


def inboxes_of(world: int, device: str, most_bytes: int = MOST_BYTES) -> list[torch.Tensor]:
    size = inbox_bytes(world, most_bytes) // 4
    found = [torch.empty(size, dtype=torch.int32, device=device) for _ in range(world)]
    for inbox in found:
        clear(inbox)
    return found


def sums_of(inboxes: list[torch.Tensor], most_bytes: int = MOST_BYTES) -> list[RankSums]:
    addresses, device = [inbox.data_ptr() for inbox in inboxes], inboxes[0].device
    return [RankSums(addresses, rank, most_bytes, device) for rank in range(len(inboxes))]


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """In fp32, in the order of the ranks, rounded once."""
    found = parts[0].float()
    for part in parts[1:]:
        found = found + part.float()
    return found.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_adds_what_has_come_and_sends_the_others_its_own(
    hopper_way: Way, world: int, dtype: torch.dtype
) -> None:
    """A rank alone: what the others send is there before it sums."""
    inboxes = inboxes_of(world, hopper_way.device)
    rank = world - 1
    own, thirds = sums_of(inboxes)[rank], [each.view(3, world, -1) for each in inboxes]
    for launch, rows in enumerate((1, 3, 2, 5, 4), start=1):
        parts = [
            hopper_way.randn(rows, 1000, dtype=dtype, seed=10 * launch + i) for i in range(world)
        ]
        words = [part.view(torch.int32).flatten() for part in parts]
        words[rank][5], words[rank][9] = NOT_COME, NOT_COME & 0xFFFF  # two -0, and one
        # Blocks take their own turns: of more rows than before there are some that had none.
        blocks, third = -(-parts[0].nbytes // 4096), launch % 3
        own._turns[:blocks] = 3 + (launch - 1) % 3  # one strip each
        for other in range(rank):
            thirds[rank][third, other, : len(words[other])] = words[other]
        expected, x = in_order(parts), parts[rank].clone()
        assert own.takes(x) and own.add(x) is x
        same_bits(x, expected)
        sent = words[rank].clone()
        sent[5] = 0
        for other in range(rank):
            assert torch.equal(thirds[other][third, rank, : len(sent)], sent)
        # What came for the launch before is gone, all that its blocks could have had.
        before = thirds[rank][(launch - 1) % 3, :, : blocks * 1024]
        assert bool((before == NOT_COME).all())


def test_what_is_left_to_others() -> None:
    own = sums_of(inboxes_of(2, "cpu"))[0]
    fits = torch.zeros(MOST_BYTES // 2, dtype=torch.float16)
    assert own.takes(fits) and own.takes(fits[8:]) and own.takes(fits.view(2, -1))
    too_many = torch.zeros(MOST_BYTES // 2 + 8, dtype=torch.float16)
    odd = (fits[:12], fits[1:9], fits.view(2, -1)[:, :8], fits[:0], fits.float()[:8])
    assert not any(own.takes(x) for x in (too_many, *odd))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_on_streams_of_one_gpu(dtype: torch.dtype) -> None:
    """Launches that wait for each other, of many sizes, one rank ahead of the other; in graphs."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this kernel needs a GPU of compute capability 9.0")
    lot, world = random.Random(f"sums {dtype}"), 2
    most_bytes = 9 << 20  # more than blocks have at once
    inboxes = inboxes_of(world, "cuda", most_bytes)
    streams = [torch.cuda.Stream() for _ in range(world)]
    # Made ready here: a kernel is not loaded while another runs, which waits for a rank.
    sums, slow = sums_of(inboxes, most_bytes), torch.zeros(1 << 22, device="cuda").add_(1)
    torch.cuda.synchronize()
    wanted, found = [], []
    for _ in range(60):
        size = 8 * int((most_bytes // 16) ** lot.random())
        parts = [torch.randn(size, device="cuda").to(dtype) for _ in range(world)]
        wanted.append(in_order(parts))
        found += [part.clone() for part in parts]
    torch.cuda.synchronize()
    for i in range(30):
        for rank in lot.sample(range(world), world):
            with torch.cuda.stream(streams[rank]):
                if lot.random() < 0.2:
                    slow.add_(1)
                sums[rank].add(found[world * i + rank])
    torch.cuda.synchronize()
    graphs = []
    for rank, stream in enumerate(streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for x in found[rank::world][30:]:
                sums[rank].add(x)
        graphs.append(graph)
    for graph, stream in zip(graphs, streams, strict=True):
        with torch.cuda.stream(stream):
            graph.replay()
    torch.cuda.synchronize()
    for i, expected in enumerate(wanted):
        for x in found[world * i : world * (i + 1)]:
            same_bits(x, expected, name=f"sum {i}")
