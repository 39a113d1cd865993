"""TensorRT-LLM's fmha_v2 attention kernels: names to fields, and a call with tensors.

The kernels are the user's own files (`*.cubin.cpp`, `.cubin`); none is shipped here.
"""

from __future__ import annotations

from .attention import Attention, plan, run
from .loading import find, load
from .mask import pack_mask
from .names import KernelName, parse_name
from .param_struct import Params

__all__ = [
    "Attention",
    "KernelName",
    "Params",
    "find",
    "load",
    "pack_mask",
    "parse_name",
    "plan",
    "run",
]
