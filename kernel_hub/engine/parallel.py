"""The processes that run one model together, by torch.distributed; alone, nothing is sent."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import KernelHubError, ModelError

T = TypeVar("T")


class Group:
    """Rank and number of the processes of one model, and what they tell each other."""

    def __init__(self) -> None:
        """As torchrun's environment says; one process without it."""
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.world > 1 and not dist.is_initialized():
            backend = "gloo"
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
                backend = "cpu:gloo,cuda:nccl"
            # Ranks wait for work, however long there is none; one that ends is seen at once.
            dist.init_process_group(backend, timeout=timedelta(days=365))
            atexit.register(dist.destroy_process_group)

    def share(self, total: int) -> tuple[int, int]:
        """This rank's part of `total` things that the world divides: from, to."""
        return self.rank * total // self.world, (self.rank + 1) * total // self.world

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """x summed over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, n) of every rank, side by side."""
        if self.world == 1:
            return x
        found = x.new_empty((self.world, *x.shape))
        dist.all_gather(list(found.unbind()), x.contiguous())
        return found.transpose(0, 1).reshape(x.shape[0], -1)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Of (rows, n) on every rank, this rank's share of the rows with all of the columns."""
        if self.world == 1:
            return x
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x)
        parts = found.view(self.world, x.shape[0] // self.world, x.shape[1])
        return parts.transpose(0, 1).reshape(parts.shape[1], -1)

    def tell(self, what: Any) -> Any:
        """What rank 0 has, on every rank."""
        if self.world > 1:
            box = [what]
            dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
            what = box[0]
        return what

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
