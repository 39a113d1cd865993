"""The zeroed counters by which the blocks of a launch find out about each other: one owner."""

from __future__ import annotations

import torch

_sets: dict[tuple[int | None, int, int], torch.Tensor] = {}


def counters(device: torch.device, count: int) -> torch.Tensor:
    """`count` int32 zeros for a launch on the current stream of `device`; it leaves zeros behind.

    Launches on one stream follow each other and share one set. A captured launch may be replayed
    beside anything: it gets its own. So does one on a stream that torch did not make: when that one
    is destroyed, another may have its handle before its work is done.
    """
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        # torch's own have odd numbers (c10/cuda/CUDAStream.cpp), the default stream 0.
        is_torchs = stream.stream_id == 0 or stream.stream_id % 2 == 1
        if is_torchs and not torch.cuda.is_current_stream_capturing():
            key = (device.index, stream.stream_id, count)
            found = _sets.get(key)
            if found is None:
                found = _sets[key] = torch.zeros(count, dtype=torch.int32, device=device)
            return found
    return torch.zeros(count, dtype=torch.int32, device=device)
