"""TensorRT-LLM's fmha_v2 attention kernels: names to fields, and a call with tensors.

The kernels are the user's own files (`*.cubin.cpp`, `.cubin`); none is shipped here.
"""

from __future__ import annotations

from ._load import find, load
from ._mask import pack_mask
from ._names import KernelName, parse_name
from ._params import Params
from ._run import Attention, plan, run

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
