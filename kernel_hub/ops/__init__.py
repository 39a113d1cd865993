"""Ready-made ops on torch tensors: CUDA tensors run the shipped cubins, CPU tensors a reference.

Each is also registered as `torch.ops.kernel_hub.<name>`, for torch.compile and torch.export.
"""

from .rms_norm import rms_norm as rms_norm
from .rope import rope as rope
from .silu_and_mul import silu_and_mul as silu_and_mul

__all__ = ["rms_norm", "rope", "silu_and_mul"]
