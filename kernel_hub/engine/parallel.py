"""The processes that run one model together, by torch.distributed; alone, nothing is sent."""

from __future__ import annotations

import atexit
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from ..errors import KernelHubError, ModelError, RankError
from ..ops.rank_sums import RankSums, clear, inbox_bytes
from ..progress import progress

T = TypeVar("T")
_POLL_S = 5e-5
_SENT_BYTES = 8 << 20  # by each rank for a sum; beyond that it is NCCL's


class Group:
    """Rank and number of the processes of one model, and what they tell each other."""

    is_broken = False  # of this process: they are no longer in step
    _links: ClassVar[dict[int, socket.socket]] = {}  # of rank 0 to each other, of those to rank 0
    _sums: ClassVar[RankSums | None] = None
    _inbox: ClassVar[Any] = None  # which the other ranks write

    def __init__(self, device: torch.device, world: int | None = None) -> None:
        """As torchrun's environment says; one process without it, or where `world` is 1.

        device: which kind; of several GPUs each process has that of its place on its host.
        Raises ModelError where a host has fewer GPUs than processes.
        """
        self.world = world or int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.world > 1 else 0
        self.device = device
        if self.world == 1:
            return
        if device.type == "cuda":
            place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
            wanted = max(place + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            if wanted > count:
                raise ModelError(f"{wanted} processes take a GPU each, and there are {count}")
            self.device = torch.device("cuda", place)
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            # Ranks wait for work, however long there is none; one that ends is seen at once.
            dist.init_process_group(backend, timeout=timedelta(days=365))
            Group._links = self._linked()
            Group._sums = self._opened()
            atexit.register(_leave, backend)

    def _linked(self) -> dict[int, socket.socket]:
        """Connections that end when the process at the other end does."""
        host = os.environ["MASTER_ADDR"]
        if self.rank:
            link = socket.create_connection((host, self.tell(None)))
            link.sendall(self.rank.to_bytes(4, "big"))
            return {0: link}
        found = dict[int, socket.socket]()
        with socket.create_server((host, 0)) as server:
            self.tell(server.getsockname()[1])
            while len(found) < self.world - 1:
                link, _ = server.accept()
                found[int.from_bytes(link.recv(4, socket.MSG_WAITALL), "big")] = link
        return found

    def _opened(self) -> RankSums | None:
        """Memory of this GPU that the others write, where all are of one host and can."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # which sums have no use for
        inbox, found, most_bytes = None, None, _SENT_BYTES // (self.world - 1)
        failures = (AttributeError, ImportError, RuntimeError)
        if self._reaches_all():
            with suppress(*failures):
                from torch.distributed import _symmetric_memory as symmetric

                size = inbox_bytes(self.world, most_bytes)
                inbox = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        if not self._all(inbox is not None):  # or those that have one would wait for the others
            return None
        with suppress(*failures):
            shared = symmetric.rendezvous(inbox, dist.group.WORLD)
            clear(inbox)
            torch.cuda.synchronize(self.device)
            found = RankSums(shared.buffer_ptrs, self.rank, most_bytes, self.device)
            Group._inbox = inbox, shared
        return found if self._all(found is not None) else None

    def _reaches_all(self) -> bool:
        """Whether every rank is a Hopper GPU of this host whose memory this one's can write."""
        return (
            self.device.type == "cuda"
            and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == self.world
            and torch.cuda.get_device_capability(self.device) == (9, 0)
            and all(
                torch.cuda.can_device_access_peer(self.device.index, i)
                for i in range(self.world)
                if i != self.device.index
            )
        )

    def _all(self, so: bool) -> bool:
        """Whether every rank says so."""
        said: list[Any] = [None] * self.world
        dist.all_gather_object(said, so)
        return all(said)

    def wait(self, event: Any) -> None:
        """Until the device has come to an event.

        Raises RankError naming a process that has ended before: what it was to send never comes,
        and NCCL would wait for it.
        """
        if self.world == 1:
            event.synchronize()
            return
        while not event.query():
            for rank, link in self._links.items():
                if select.select([link], (), (), 0)[0]:
                    raise RankError(f"rank {rank} of {self.world} has ended")
            time.sleep(_POLL_S)

    def share(self, total: int) -> tuple[int, int]:
        """This rank's part of `total` things that the world divides: from, to."""
        return self.rank * total // self.world, (self.rank + 1) * total // self.world

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """x summed over the ranks, in place; few bytes by a kernel of ours."""
        if self.world == 1:
            return x
        if self._sums is not None and self._sums.takes(x):
            return self._sums.add(x)
        dist.all_reduce(x)
        return x

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """(..., n) of every rank, side by side."""
        if self.world == 1:
            return x
        found = x.new_empty((self.world, *x.shape)).unbind()
        dist.all_gather(list(found), x.contiguous())
        return torch.cat(found, -1)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Of (rows, n) on every rank, this rank's share of the rows with all of the columns."""
        if self.world == 1:
            return x
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x)
        return torch.cat(found.chunk(self.world), -1)

    def tell(self, what: Any) -> Any:
        """What rank 0 has, on every rank."""
        if self.world > 1:
            box = [what]
            dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
            what = box[0]
        return what

    def progress(self, total: int, label: str) -> AbstractContextManager[Callable[[str], Any]]:
        """A bar of rank 0 where somebody looks."""
        shows = sys.stderr.isatty() and self.rank == 0 and self.device.type != "meta"
        return progress(total, label) if shows else nullcontext(str)

    def agree(self, make: Callable[[], T]) -> T:
        """What `make` gives; what it refuses on any rank is raised on all, so that none waits."""
        if self.world == 1:
            return make()
        try:
            found, problem = make(), None
        except KernelHubError as error:
            problem = error
        said: list[Any] = [None] * self.world
        dist.all_gather_object(said, problem and f"rank {self.rank} of {self.world}: {problem}")
        if problem is not None:
            raise problem
        if any(said):
            raise ModelError("; ".join(filter(None, said)))
        return found


def _leave(backend: str) -> None:
    """End of the process."""
    if Group.is_broken and "nccl" in backend:
        # The device may be waiting for a rank that is no more; so would all that waits for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)
    dist.destroy_process_group()
