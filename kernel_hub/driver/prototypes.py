"""The driver functions that are called, their parameters, and the attributes that are asked."""

from __future__ import annotations

from ctypes import c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

# Letters: p pointer or handle, i int, u unsigned, Q 64-bit unsigned, z size_t, s C string.
TYPES: dict[str, Any] = {
    "p": c_void_p,
    "i": c_int,
    "u": c_uint,
    "Q": c_ulonglong,
    "z": c_size_t,
    "s": c_char_p,
}
# Present in every driver that can load cubin libraries (12.0 and later), which has NEWEST.
NEWEST = "cuLibraryLoadData"
REQUIRED = {
    "cuInit": "u",
    "cuDriverGetVersion": "p",
    "cuDeviceGetCount": "p",
    "cuDeviceGetName": "pii",
    "cuDeviceGetAttribute": "pii",
    "cuDeviceTotalMem_v2": "pi",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuCtxGetCurrent": "p",
    "cuCtxSetCurrent": "p",
    "cuCtxPushCurrent_v2": "p",
    "cuCtxPopCurrent_v2": "p",
    "cuCtxSynchronize": "",
    "cuLinkCreate_v2": "uppp",
    "cuLinkAddData_v2": "pipzsupp",
    "cuLinkComplete": "ppp",
    "cuLinkDestroy": "p",
    "cuLibraryLoadData": "ppppuppu",
    "cuLibraryUnload": "p",
    "cuLibraryGetKernel": "pps",
    "cuLibraryGetGlobal": "ppps",
    "cuKernelGetFunction": "pp",
    "cuFuncGetAttribute": "pip",
    "cuFuncSetAttribute": "pii",
    "cuLaunchKernelEx": "pppp",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": "ppiz",
    "cuStreamCreate": "pu",
    "cuStreamDestroy_v2": "p",
    "cuStreamSynchronize": "p",
    "cuStreamIsCapturing": "pp",
    "cuStreamQuery": "p",
    "cuStreamWaitEvent": "ppu",
    "cuThreadExchangeStreamCaptureMode": "p",
    "cuEventCreate": "pu",
    "cuEventRecord": "pp",
    "cuEventQuery": "p",
    "cuEventSynchronize": "p",
    "cuEventElapsedTime": "ppp",
    "cuEventDestroy_v2": "p",
    "cuMemHostAlloc": "pzu",
    "cuMemFreeHost": "p",
    "cuMemGetInfo_v2": "pp",
    "cuMemPoolCreate": "pp",
    "cuMemPoolDestroy": "p",
    "cuMemPoolSetAttribute": "pip",
    "cuMemPoolGetAttribute": "pip",
    "cuMemPoolTrimTo": "pz",
    "cuMemAllocFromPoolAsync": "pzpp",
    "cuMemFreeAsync": "Qp",
    "cuMemcpyHtoDAsync_v2": "Qpzp",
    "cuMemcpyDtoHAsync_v2": "pQzp",
    "cuMemcpyDtoDAsync_v2": "QQzp",
    "cuMemsetD8Async": "Quzp",
    "cuPointerGetAttribute": "piQ",
    "cuTensorMapEncodeTiled": "piupppppiiii",
}
# Newer: what uses one of these asks `has` first and does without.
OPTIONAL = {
    "cuGetErrorString": "ip",
    "cuLibraryGetKernelCount": "pp",  # 12.4
    "cuLibraryEnumerateKernels": "pup",  # 12.4
    "cuKernelGetName": "pp",  # 12.3
    "cuKernelGetParamInfo": "pzpp",  # 12.4
    "cuFuncLoad": "p",  # 12.4
    "cuStreamGetDevice": "pp",  # 12.8
    "cuLogsCurrent": "pu",  # 12.9
    "cuLogsDumpToMemory": "pppu",  # 12.9
}
FUNCTIONS = {**REQUIRED, **OPTIONAL}

# Device attributes (CUdevice_attribute) used by the layers above.
MAX_GRID_DIM = (5, 6, 7)
MAX_BLOCK_DIM = (2, 3, 4)
MULTIPROCESSOR_COUNT = 16
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76
SHARED_PER_BLOCK_OPTIN = 97
MEMORY_POOLS_SUPPORTED = 115
