"""Ready-made ops on torch tensors: CUDA tensors run the shipped cubins, CPU tensors a reference.

Each is also registered as `torch.ops.kernel_hub.<name>`, for torch.compile and torch.export.
"""

from ..errors import MissingPackageError

try:
    import torch as torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingPackageError(
        "kernel_hub.ops takes torch's tensors, and torch is not installed: pip install torch (or "
        "'kernel_hub[torch]'). Without it, kernel_hub.registry's kernels take DeviceArrays."
    ) from error

from .attention.flash_attention import flash_attention as flash_attention
from .attention.flash_attention import flash_attention_qkvpacked as flash_attention_qkvpacked
from .attention.merge_states import merge_states as merge_states
from .kv_cache.append_kv import append_kv as append_kv
from .kv_cache.copy_blocks import copy_blocks as copy_blocks
from .kv_cache.decode_attention import decode_attention as decode_attention
from .kv_cache.mla_decode import mla_decode as mla_decode
from .matmul.batched_matmul import batched_matmul as batched_matmul
from .matmul.grouped_linear import grouped_linear as grouped_linear
from .matmul.linear import linear as linear
from .matmul.swiglu_linear import gated_linear as gated_linear
from .matmul.swiglu_linear import swiglu_linear as swiglu_linear
from .moe.moe_combine import moe_combine as moe_combine
from .moe.moe_permute import moe_permute as moe_permute
from .moe.moe_route import moe_route as moe_route
from .projection.qkv_linear import qkv_linear as qkv_linear
from .rowwise.gelu import gelu as gelu
from .rowwise.gelu_and_mul import gelu_and_mul as gelu_and_mul
from .rowwise.layer_norm import layer_norm as layer_norm
from .rowwise.quantize_e4m3 import quantize_e4m3 as quantize_e4m3
from .rowwise.relu_squared import relu_squared as relu_squared
from .rowwise.rms_norm import rms_norm as rms_norm
from .rowwise.rope import rope as rope
from .rowwise.silu_and_mul import silu_and_mul as silu_and_mul
from .rowwise.softmax import log_softmax as log_softmax
from .rowwise.softmax import softmax as softmax
from .rowwise.swigluoai_and_mul import swigluoai_and_mul as swigluoai_and_mul
from .sampling.sample import sample as sample
from .sampling.sample_slice import sample_slice as sample_slice
from .sampling.verify_draft import verify_draft as verify_draft
from .sampling.verify_tree import verify_tree as verify_tree
from .tokens.cu_seqlens import cu_seqlens as cu_seqlens
from .tokens.embedding import embedding as embedding
from .tokens.pad_input import pad_input as pad_input
from .tokens.pad_input import unpad_input as unpad_input

__all__ = [
    "append_kv",
    "batched_matmul",
    "copy_blocks",
    "cu_seqlens",
    "decode_attention",
    "embedding",
    "flash_attention",
    "flash_attention_qkvpacked",
    "gated_linear",
    "gelu",
    "gelu_and_mul",
    "grouped_linear",
    "layer_norm",
    "linear",
    "log_softmax",
    "merge_states",
    "mla_decode",
    "moe_combine",
    "moe_permute",
    "moe_route",
    "pad_input",
    "qkv_linear",
    "quantize_e4m3",
    "relu_squared",
    "rms_norm",
    "rope",
    "sample",
    "sample_slice",
    "silu_and_mul",
    "softmax",
    "swiglu_linear",
    "swigluoai_and_mul",
    "unpad_input",
    "verify_draft",
    "verify_tree",
]
