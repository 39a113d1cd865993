"""Ready-made ops on torch tensors: CUDA tensors run the shipped cubins, CPU tensors a reference.

Each is also registered as `torch.ops.kernel_hub.<name>`, for torch.compile and torch.export.
"""

from .append_kv import append_kv as append_kv
from .decode_attention import decode_attention as decode_attention
from .flash_attention import flash_attention as flash_attention
from .flash_attention import flash_attention_qkvpacked as flash_attention_qkvpacked
from .linear import linear as linear
from .merge_states import merge_states as merge_states
from .rms_norm import rms_norm as rms_norm
from .rope import rope as rope
from .silu_and_mul import silu_and_mul as silu_and_mul

__all__ = [
    "append_kv",
    "decode_attention",
    "flash_attention",
    "flash_attention_qkvpacked",
    "linear",
    "merge_states",
    "rms_norm",
    "rope",
    "silu_and_mul",
]
