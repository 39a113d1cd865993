"""The two ways a kernel runs in these tests: emulated on the CPU, and on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@dataclass(frozen=True)
class Way:
    """Where the tensors are; the public ops then run the kernels there."""

    name: str
    device: str

    @property
    def is_gpu(self) -> bool:
        return self.name == "gpu"

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
        """The same numbers on both ways."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(dtype).to(self.device)
