"""The structs of native/launcher.h, and torch's of DLPack."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int64, c_uint32, c_uint64, c_void_p

from .geometry import ATTRIBUTE_BYTES, CONFIG

MAX_PARAMS = 64
# In the order of the enum in native/launcher.c.
NAMES = (
    "gridDim", "blockDim", "sharedMemBytes", "stream", "params", "sharedMem", "programmatic",
    "cluster",
)  # fmt: skip


class ParamStruct(ctypes.Structure):
    _fields_ = [
        ("kind", c_uint32),
        ("size_bytes", c_uint32),
        ("least", c_int64),
        ("most", c_int64),
        ("dtype", c_void_p),
        ("dlpack_dtype", c_uint32),
        ("zero_bits", c_uint32),
    ]


class Place(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("context", c_void_p),
        ("current_context", c_void_p),
    ]


class State(ctypes.Structure):
    _fields_ = [
        ("launch_ex", c_void_p),
        ("function", c_void_p),
        ("fallback", c_void_p),
        ("current_stream", c_void_p),
        ("device", c_void_p),
        ("names", c_void_p * len(NAMES)),
        ("name_dtype", c_void_p),
        ("name_is_cuda", c_void_p),
        ("name_data_ptr", c_void_p),
        ("tensor_types", c_void_p * 2),
        ("as_dltensor", c_void_p),
        ("work_stream", c_void_p),
        ("noted", c_void_p),
        ("place", Place),
        ("max_grid", c_uint32 * 3),
        ("max_block", c_uint32 * 3),
        ("required_block", c_uint32 * 3),
        ("cluster", c_uint32 * 3),
        ("max_threads", c_uint32),
        ("num_params", c_uint32),
        ("fixed_block", c_uint32 * 3),
        ("fixed_shared", c_uint32),
        ("num_hidden", c_uint32),
        ("least_shared", c_uint32),
        ("max_cluster", c_uint32),
        ("pad", c_uint32),
        ("shared_ready", c_uint64),
        ("params", ParamStruct * MAX_PARAMS),
    ]


class Bound(ctypes.Structure):
    _fields_ = [
        ("launch_ex", c_void_p),
        ("function", c_void_p),
        ("addresses", c_void_p),
        ("fallback", c_void_p),
        ("current_stream", c_void_p),
        ("device", c_void_p),
        ("work_stream", c_void_p),
        ("noted", c_void_p),
        ("place", Place),
        ("config", ctypes.c_ubyte * CONFIG.size),
    ]


class At(ctypes.Structure):
    _fields_ = [
        ("state", POINTER(State)),
        ("fallback", c_void_p),
        ("grid", c_uint32 * 3),
        ("pad", c_uint32),
    ]


class PlannedLaunch(ctypes.Structure):
    _fields_ = [
        ("state", POINTER(State)),
        ("fallback", c_void_p),
        ("make", c_void_p),
        ("make_arguments", c_void_p),
        ("config", c_uint64 * (CONFIG.size // 8)),
        ("attributes", c_uint64 * (2 * ATTRIBUTE_BYTES // 8)),
        ("num_given", c_uint32),
        ("num_params", c_uint32),
        ("places", ctypes.c_uint8 * MAX_PARAMS),
        ("values", c_uint64 * MAX_PARAMS),
    ]


class Exchange(ctypes.Structure):
    """DLPackExchangeAPI of DLPack 1.3."""

    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("older", c_void_p),
        ("allocate", c_void_p),
        ("from_object", c_void_p),
        ("to_object", c_void_p),
        ("as_dltensor", c_void_p),
        ("work_stream", c_void_p),
    ]
